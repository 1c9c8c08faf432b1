// Host side of the float32 kernel: from a tile's numbers to its types, and the launch.
#pragma once

#include <fa101/error.h>

#include "common/launch.h"
#include "common/mask.h"
#include "flash_attn_tf32/family.h"
#include "flash_attn_tf32/kernel.cuh"
#include "flash_attn_tf32/tile_config.h"

#include <cstdint>
#include <iterator>
#include <string>

namespace fa101::tf32 {

template <int kTileIndex, bool kHasExtras>
void run_kernel(const Problem& problem, const Tensors& tensors, Stream stream) {
    constexpr TileConfig kTile = kTiles[kTileIndex];
    constexpr int kNThreads = 32 * kTile.num_warps, kSmemBytes = kTile.smem_bytes();
    const auto kernel = fa2_tf32_kernel<kTileIndex, kHasExtras>;
    const int64_t grid =
        problem.batch * problem.num_heads * ceil_div<int64_t>(problem.seqlen_q, kTile.block_m);
    allow_shared_memory(kernel, "fa2_tf32_kernel", kSmemBytes);
    kernel<<<static_cast<unsigned>(grid), kNThreads, kSmemBytes,
             static_cast<cudaStream_t>(stream)>>>(problem, tensors);
    check_launch("fa2_tf32_kernel", grid, kNThreads, kSmemBytes);
}

// Runs the tile of the table that the plan names, of those for kHeadDim.
template <int kHeadDim, int kTileIndex = 0>
void run_hdim(const Plan& plan, const Problem& problem, const Tensors& tensors, Stream stream) {
    if constexpr (kTileIndex == std::size(kTiles)) {
        throw Unsupported("fa2_cute has no float32 tile of " + std::to_string(plan.tile.block_m) +
                          " queries for head_dim " + std::to_string(kHeadDim));
    } else {
        if constexpr (kTiles[kTileIndex].head_dim == kHeadDim) {
            if (plan.tile.block_m == kTiles[kTileIndex].block_m) {
                const bool has_extras = problem.softcap > 0 || problem.has_bias || problem.has_mask;
                return has_extras ? run_kernel<kTileIndex, true>(problem, tensors, stream)
                                  : run_kernel<kTileIndex, false>(problem, tensors, stream);
            }
        }
        run_hdim<kHeadDim, kTileIndex + 1>(plan, problem, tensors, stream);
    }
}

}  // namespace fa101::tf32
