// How a warp of fa1 and fa2 shares out its part of S = Q K^T and O = P V: every lane owns a small
// block of S and a small block of O in registers. Plain C++; the arithmetic is in warp_tile.cuh.
//
//               keys (S) or columns of v (O) ->
//      queries  lane (m, n) owns queries m, m + kLanesM, ... (kRows of them),
//         |     keys n, n + kLanesN, ... (kKeys of them), and of O the 4-column groups
//         v     n, n + kLanesN, ... (kCols columns in all)
//
// A whole row of S stays in one warp, so its softmax needs shuffles and no block-wide barrier.
#pragma once

#include "common/host_device.h"

namespace fa101 {

template <int kHeadDim_, int kLanesM_, int kRows_, int kKeys_>
struct WarpTile {
    static constexpr int kHeadDim = kHeadDim_;  // the largest that fits; smaller ones are padded
    static constexpr int kLanesM = kLanesM_;
    static constexpr int kLanesN = 32 / kLanesM;
    static constexpr int kRows = kRows_;
    static constexpr int kKeys = kKeys_;
    static constexpr int kCols = kHeadDim / kLanesN;
    static_assert(kLanesM % 2 == 0 && kCols % 4 == 0, "see lane_m and the 4-column groups");

    static constexpr int kWarpM = kLanesM * kRows;   // queries of a warp
    static constexpr int kBlockN = kLanesN * kKeys;  // keys of a step

    // Rows of shared memory, in floats. A 128-bit load is free of bank conflicts when the 8 rows
    // that 8 lanes read start 4 banks apart: strides are 4 modulo 32. The rows of P are written
    // kLanesN floats at a time, kLanesM rows together, which fill all banks when the stride is
    // kLanesN modulo 32 (or 24, its mirror).
    static constexpr int kStrideQ = kHeadDim + 4;
    static constexpr int kStrideP = kBlockN + kLanesN;

    // Lanes 0 and 1 share n, lanes 0 and 2 share m, and so on: 128-bit loads of shared memory are
    // merged between lanes that differ in bit 0 or bit 1 and read the same address, so loads along
    // m and along n both take part. (CUTLASS interleaves its SIMT lanes for the same reason.)
    FA101_HOST_DEVICE static constexpr int lane_m(int lane) {
        return lane / (2 * kLanesN) * 2 + lane % 2;
    }
    FA101_HOST_DEVICE static constexpr int lane_n(int lane) { return lane / 2 % kLanesN; }
};

}  // namespace fa101
