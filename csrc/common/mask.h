// The mask, in one place for every rung, host and device: which keys a query sees, which key
// blocks a query block visits and which of those need an element-wise check.
//
//        keys ->  block 0   block 1   block 2   block 3
//     query i   | partly  | full    | partly  |         |   query i sees [key_begin(i), key_end(i))
//     query i+1 | partly  | full    | full    | partly  |
//
// Both ends move right with the query, one key a query. A tile of queries [m_begin, m_end) visits
// the blocks [n_block_begin, n_block_end), the union; [n_block_full_begin, n_block_full_end) of
// them without checks.
#pragma once

#include <fa101/params.h>

#include "common/host_device.h"

#include <cstdint>

namespace fa101 {

template <class Int>
FA101_HOST_DEVICE constexpr Int ceil_div(Int a, Int b) {
    return (a + b - 1) / b;
}

template <class Int>
FA101_HOST_DEVICE constexpr Int clamp_to(Int value, Int low, Int high) {
    return value < low ? low : value < high ? value : high;
}

// The mask as one tile sees it, in 32 bits: queries count from the tile's first, keys from any key.
struct TileMask {
    int num_keys;
    int first_key_begin, first_key_end;  // of query 0, were there keys without end to either side

    FA101_HOST_DEVICE int key_begin(int i) const {
        return clamp_to(i + first_key_begin, 0, num_keys);
    }
    FA101_HOST_DEVICE int key_end(int i) const { return clamp_to(i + first_key_end, 0, num_keys); }

    FA101_HOST_DEVICE TileMask from_key(int n_begin) const {
        return {num_keys - n_begin, first_key_begin - n_begin, first_key_end - n_begin};
    }
};

struct Mask {
    int64_t seqlen_k;
    int64_t mask_left, mask_right;  // see Problem::mask_left

    // The first key query i sees, and one past the last; equal or crossed when it sees none.
    FA101_HOST_DEVICE int key_begin(int64_t i) const {
        return static_cast<int>(clamp_to<int64_t>(i + mask_left, 0, seqlen_k));
    }
    FA101_HOST_DEVICE int key_end(int64_t i) const {
        return static_cast<int>(clamp_to<int64_t>(i + mask_right + 1, 0, seqlen_k));
    }
    FA101_HOST_DEVICE bool sees_key(int64_t i, int j) const {
        return key_begin(i) <= j && j < key_end(i);
    }

    // For the queries [m_begin, m_begin + block_m). Past either end of the keys it does not matter
    // how far the diagonal is, so it is cut to what the tile can tell.
    FA101_HOST_DEVICE TileMask tile(int m_begin, int block_m) const {
        return {static_cast<int>(seqlen_k),
                static_cast<int>(clamp_to<int64_t>(m_begin + mask_left, -block_m, seqlen_k)),
                static_cast<int>(clamp_to<int64_t>(m_begin + mask_right + 1, -block_m, seqlen_k))};
    }

    // Key blocks of block_n that some query of [m_begin, m_end) may see part of.
    FA101_HOST_DEVICE int n_block_begin(int m_begin, int block_n) const {
        return key_begin(m_begin) / block_n;
    }
    FA101_HOST_DEVICE int n_block_end(int m_end, int block_n) const {
        return ceil_div(key_end(m_end - 1), block_n);
    }

    // Key blocks that all queries of [m_begin, m_end) see whole: the last query's window starts
    // last, the first query's ends first. Crossed when there are none.
    FA101_HOST_DEVICE int n_block_full_begin(int m_end, int block_n) const {
        return ceil_div(key_begin(m_end - 1), block_n);
    }
    FA101_HOST_DEVICE int n_block_full_end(int m_begin, int block_n) const {
        return key_end(m_begin) / block_n;
    }
};

// The mask of batch entry `batch`: seqlens_k says how many of the keys exist, not counting the
// seqlen_new that were appended, as far as there was room.
FA101_HOST_DEVICE Mask mask_of(const Problem& problem, const Tensors& tensors, int64_t batch) {
    Mask mask{problem.seqlen_k, problem.mask_left, problem.mask_right};
    if (tensors.seqlens_k_ptr != nullptr) {
        const int64_t length = tensors.seqlens_k_ptr[batch * tensors.seqlens_k_stride];
        const int64_t cached = clamp_to<int64_t>(length, 0, problem.seqlen_k);
        mask.seqlen_k = clamp_to<int64_t>(cached + problem.seqlen_new, 0, problem.seqlen_k);
        if (problem.diagonal_follows_seqlens_k) {
            mask.mask_left += mask.seqlen_k - problem.seqlen_k;
            mask.mask_right += mask.seqlen_k - problem.seqlen_k;
        }
    }
    return mask;
}

}  // namespace fa101
