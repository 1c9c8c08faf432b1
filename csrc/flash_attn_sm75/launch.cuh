// Host side of the Turing kernel: from a tile's numbers to its types, and the launch.
#pragma once

#include "common/launch.h"
#include "common/mask.h"
#include "flash_attn_sm75/family.h"
#include "flash_attn_sm75/kernel.cuh"
#include "flash_attn_sm75/tile_config.h"

#include <cstdint>

namespace fa101::sm75 {

template <int kTileIndex, bool kHasExtras>
void run_kernel(const Problem& problem, const Tensors& tensors, Stream stream) {
    constexpr TileConfig kTile = kTiles[kTileIndex];
    constexpr int kNThreads = 32 * kTile.num_warps, kSmemBytes = kTile.smem_bytes();
    static_assert(kSmemBytes <= 48 * 1024, "no opting in");
    const int64_t grid =
        problem.batch * problem.num_heads * ceil_div<int64_t>(problem.seqlen_q, kTile.block_m);
    fa2_sm75_kernel<kTileIndex, kHasExtras>
        <<<static_cast<unsigned>(grid), kNThreads, kSmemBytes, static_cast<cudaStream_t>(stream)>>>(
            problem, tensors);
    check_launch("fa2_sm75_kernel", grid, kNThreads, kSmemBytes);
}

template <int kHeadDim, int kTileIndex = 0>
void run_hdim(const Problem& problem, const Tensors& tensors, Stream stream) {
    if constexpr (kTiles[kTileIndex].head_dim != kHeadDim) {
        run_hdim<kHeadDim, kTileIndex + 1>(problem, tensors, stream);
    } else if (problem.softcap > 0 || problem.has_bias || problem.has_mask) {
        run_kernel<kTileIndex, true>(problem, tensors, stream);
    } else {
        run_kernel<kTileIndex, false>(problem, tensors, stream);
    }
}

}  // namespace fa101::sm75
