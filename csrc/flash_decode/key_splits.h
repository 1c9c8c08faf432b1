// Where the splits of the keys begin: a function of the split's number and nothing else, so that
// neither a longer cache nor other company changes a bit.
#pragma once

#include "common/host_device.h"

#include <cstdint>

namespace fa101::flash_decode {

constexpr int kMaxChunk = 8192;

// The first 32 splits have `chunk` keys each, the next 16 twice as many, then 16 of four times as
// many, and so on up to kMaxChunk. Short caches need small splits to fill the GPU; in long ones
// each split costs the start of a block and a part of the result, and these are few enough.
//
//      keys in units of chunk   0 ... 32    34    36 ...    64      68      72 ...
//      splits                   | | | |     |     |         |       |       |
struct KeySplits {
    int chunk = 0;
    int doublings = 0;  // 0: all have as many

    static constexpr int kFirst = 32, kPerSize = 16;

    static KeySplits growing(int chunk) {
        KeySplits splits{chunk, 0};
        while (int64_t{chunk} << (splits.doublings + 1) <= kMaxChunk) ++splits.doublings;
        return splits;
    }

    // The first key of a split; it ends where the next one begins, or with the keys.
    FA101_HOST_DEVICE int64_t begin(int split) const {
        if (split <= kFirst || doublings == 0) return int64_t{chunk} * split;
        const int later = split - kFirst, size = later / kPerSize;
        const int doubled = size < doublings ? size : doublings - 1;
        return (int64_t{chunk} << doubled) * (kFirst + 2 * (later - kPerSize * doubled));
    }

    int count(int64_t seqlen_k) const {
        int splits = 1;
        while (begin(splits) < seqlen_k) ++splits;
        return splits;
    }
};

}  // namespace fa101::flash_decode
