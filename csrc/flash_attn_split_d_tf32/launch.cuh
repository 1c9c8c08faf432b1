// Host side of split_d in float32: the tile of a plan, and the launch.
#pragma once

#include <fa101/error.h>

#include "common/launch.h"
#include "common/mask.h"
#include "flash_attn_split_d_tf32/family.h"
#include "flash_attn_split_d_tf32/kernel.cuh"
#include "flash_attn_split_d_tf32/tile_config.h"

#include <cstdint>
#include <iterator>
#include <string>

namespace fa101::split_d_tf32 {

template <int kTileIndex>
void run_kernel(const Problem& problem, const Tensors& tensors, const Partials& partials,
                Stream stream) {
    constexpr TileConfig kTile = kTiles[kTileIndex];
    constexpr int kNThreads = 32 * kNumWarps, kSmemBytes = kTile.smem_bytes();
    const auto kernel = split_d_tf32_kernel<kTileIndex>;
    const int64_t grid = problem.batch * problem.num_heads * partials.num_splits *
                         ceil_div<int64_t>(problem.seqlen_q, kTile.block_m);
    allow_shared_memory(kernel, "split_d_tf32_kernel", kSmemBytes);
    kernel<<<static_cast<unsigned>(grid), kNThreads, kSmemBytes,
             static_cast<cudaStream_t>(stream)>>>(problem, tensors, partials);
    check_launch("split_d_tf32_kernel", grid, kNThreads, kSmemBytes);
}

// Runs the tile of the table that the plan names, of those for kHeadDim: the first of as many
// queries and slots that fits the device.
template <int kHeadDim, int kTileIndex = 0>
void run_hdim(const Plan& plan, const Problem& problem, const Tensors& tensors,
              const Partials& partials, Stream stream) {
    if constexpr (kTileIndex == std::size(kTiles)) {
        throw Unsupported("split_d has no float32 tile of " + std::to_string(plan.tile.block_m) +
                          " queries for head_dim " + std::to_string(kHeadDim));
    } else {
        constexpr TileConfig kTile = kTiles[kTileIndex];
        if constexpr (kTile.head_dim == kHeadDim) {
            if (plan.tile.block_m == kTile.block_m && plan.tile.stages == kTile.slots) {
                return run_kernel<kTileIndex>(problem, tensors, partials, stream);
            }
        }
        run_hdim<kHeadDim, kTileIndex + 1>(plan, problem, tensors, partials, stream);
    }
}

}  // namespace fa101::split_d_tf32
