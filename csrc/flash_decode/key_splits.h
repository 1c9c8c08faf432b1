// Where the splits of the keys begin: a function of the split's number and nothing else, so that
// neither a longer cache nor other company changes a bit.
#pragma once

#include "common/host_device.h"

#include <cstdint>

namespace fa101::flash_decode {

// Splits are whole steps of every tile.
constexpr int kChunkStep = 128;
constexpr int kMaxChunk = 8192;

// The first 32 splits have `chunk` keys each, the next 16 twice as many, then 16 of four times as
// many, and so on up to kMaxChunk. Short caches need small splits to fill the GPU; in long ones
// each split costs the start of a block and a part of the result, and these are few enough. A
// first chunk of 1024 is cut into quarters and a half for caches no longer than that: measured with
// one query, it gains 13 % there and costs 2 % at four times as many keys. Smaller ones have
// nothing to gain from it; larger ones lose up to 9 %, as the next, whole ones keep a few SMs busy
// alone.
//
//      keys in units of chunk   0   1   2 ...  32      34      36 ...  64 ...
//      splits                   ||| |   |      |       |       |       |
struct KeySplits {
    int chunk = 0;
    int doublings = 0;  // 0: all have as many
    int pieces = 1;     // of the first chunk; or 3

    static constexpr int kFirst = 32, kPerSize = 16;

    static KeySplits growing(int chunk, bool is_decoding) {
        KeySplits splits{chunk};
        while (int64_t{chunk} << (splits.doublings + 1) <= kMaxChunk) ++splits.doublings;
        if (is_decoding && chunk == 1024) splits.pieces = 3;
        return splits;
    }

    // The first key of a split; it ends where the next one begins, or with the keys.
    FA101_HOST_DEVICE int64_t begin(int split) const {
        if (split < pieces) return int64_t{split} * chunk / 4;
        split -= pieces - 1;
        if (split <= kFirst || doublings == 0) return int64_t{chunk} * split;
        const int later = split - kFirst, size = later / kPerSize;
        const int doubled = size < doublings ? size : doublings - 1;
        return (int64_t{chunk} << doubled) * (kFirst + 2 * (later - kPerSize * doubled));
    }

    // Which of the first num_splits holds the key, or comes nearest before it.
    FA101_HOST_DEVICE int split_of(int64_t key, int num_splits) const {
        int low = 0, high = num_splits;  // begin(low) <= key < begin(high)
        while (high - low > 1) {
            const int middle = low + (high - low) / 2;
            (begin(middle) <= key ? low : high) = middle;
        }
        return low;
    }

    int count(int64_t seqlen_k) const {
        int splits = 1;
        while (begin(splits) < seqlen_k) ++splits;
        return splits;
    }
};

// Keys [begin, end); crossed when there are none.
struct KeyRange {
    int begin, end;
    FA101_HOST_DEVICE bool is_empty() const { return begin >= end; }
};

// What the block of a split does for a tile of rows. Who merges waits for the parts, so both sides
// must agree on which there are.
enum class Role { kNothing, kWholeResult, kPart };

// `tile_keys` are those that some row of the tile sees, `split_keys` those of them in the split.
// Rows that see nothing get their zeros from the first split.
FA101_HOST_DEVICE Role role_of(int split, KeyRange split_keys, KeyRange tile_keys) {
    if (tile_keys.is_empty()) return split == 0 ? Role::kWholeResult : Role::kNothing;
    if (split_keys.is_empty()) return Role::kNothing;
    const bool has_all = split_keys.begin == tile_keys.begin && split_keys.end == tile_keys.end;
    return has_all ? Role::kWholeResult : Role::kPart;
}

// The splits that leave parts, from first to last; none where they are the same.
struct PartRange {
    int first, last;
    FA101_HOST_DEVICE bool is_empty() const { return first == last; }
};
FA101_HOST_DEVICE PartRange parts_of(const KeySplits& keys, int num_splits, KeyRange tile_keys) {
    if (tile_keys.is_empty()) return {0, 0};
    return {keys.split_of(tile_keys.begin, num_splits),
            keys.split_of(tile_keys.end - 1, num_splits)};
}

}  // namespace fa101::flash_decode
