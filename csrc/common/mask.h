// The mask, in one place for every rung, host and device: which keys a query sees, which key
// blocks a query block visits and which of those need an element-wise check.
//
//        keys ->  block 0   block 1   block 2          query i sees keys [0, key_end(i))
//     query i   | full    | full    | partly |         a tile of queries [m_begin, m_end) visits
//     query i+1 | full    | full    | partly |           blocks [0, n_block_end)     (the union)
//                                                        blocks [0, n_block_full)    without checks
#pragma once

#include "common/host_device.h"

#include <cstdint>

namespace fa101 {

template <class Int>
FA101_HOST_DEVICE constexpr Int ceil_div(Int a, Int b) {
    return (a + b - 1) / b;
}

// The mask as one tile sees it, in 32 bits: queries count from the tile's first, keys from any key.
struct TileMask {
    int num_keys;
    int first_key_end;  // of query 0, were there keys without end to either side

    FA101_HOST_DEVICE int key_end(int i) const {
        const int end = i + first_key_end;
        return end < 0 ? 0 : end < num_keys ? end : num_keys;
    }

    FA101_HOST_DEVICE TileMask from_key(int n_begin) const {
        return {num_keys - n_begin, first_key_end - n_begin};
    }
};

struct Mask {
    int64_t seqlen_k;
    int64_t mask_right;  // see Problem::mask_right

    // One past the last key query i sees; 0 when it sees none.
    FA101_HOST_DEVICE int key_end(int64_t i) const {
        const int64_t end = i + mask_right + 1;
        return static_cast<int>(end < 0 ? 0 : end < seqlen_k ? end : seqlen_k);
    }

    // For the queries [m_begin, m_begin + block_m). Past either end of the keys it does not matter
    // how far the diagonal is, so it is cut to what the tile can tell.
    FA101_HOST_DEVICE TileMask tile(int m_begin, int block_m) const {
        const int64_t end = m_begin + mask_right + 1;
        return {static_cast<int>(seqlen_k), static_cast<int>(end < -block_m   ? -block_m
                                                             : end < seqlen_k ? end
                                                                              : seqlen_k)};
    }

    // Key blocks of kBlockN that some query of [m_begin, m_end) sees part of.
    FA101_HOST_DEVICE int n_block_end(int m_end, int block_n) const {
        return ceil_div(key_end(m_end - 1), block_n);
    }

    // Leading key blocks that every query from m_begin on sees whole. The first query of a tile
    // sees the fewest keys, so it decides.
    FA101_HOST_DEVICE int n_block_full(int m_begin, int block_n) const {
        return key_end(m_begin) / block_n;
    }
};

}  // namespace fa101
