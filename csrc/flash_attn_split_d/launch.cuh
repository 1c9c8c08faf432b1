// Host side of split_d: from a tile's numbers to its types, and the launch.
#pragma once

#include <fa101/error.h>

#include "common/launch.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "flash_attn_split_d/family.h"
#include "flash_attn_split_d/kernel.cuh"
#include "flash_attn_split_d/kernel_traits.h"
#include "flash_attn_split_d/tile_config.h"

#include <cstdint>
#include <iterator>
#include <string>

namespace fa101::split_d {

template <class Element, int kTileIndex>
void run_kernel(const Problem& problem, const Tensors& tensors, const Partials& partials,
                Stream stream) {
    using Traits = split_d::Traits<Element, kTileIndex>;
    const auto kernel = split_d_kernel<Traits>;
    const int64_t grid = problem.batch * problem.num_heads * partials.num_splits *
                         ceil_div<int64_t>(problem.seqlen_q, Traits::kBlockM);
    const float scale = problem.softmax_scale, softcap = problem.softcap;
    allow_shared_memory(kernel, "split_d_kernel", Traits::kSmemBytes);
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, Traits::kSmemBytes,
             static_cast<cudaStream_t>(stream)>>>(problem, tensors, partials,
                                                  softcap > 0.0f ? scale / softcap : scale * kLog2e,
                                                  softcap * kLog2e);
    check_launch("split_d_kernel", grid, Traits::kNThreads, Traits::kSmemBytes);
}

// Runs the tile of the table that the plan names, of those for kHeadDim.
template <class Element, int kHeadDim, int kTileIndex = 0>
void run_planned(const Plan& plan, const Problem& problem, const Tensors& tensors,
                 const Partials& partials, Stream stream) {
    if constexpr (kTileIndex == std::size(kTiles)) {
        throw Unsupported("split_d has no tile of " + std::to_string(plan.tile.block_m) +
                          " queries x " + std::to_string(plan.tile.block_n) +
                          " keys for head_dim " + std::to_string(kHeadDim));
    } else {
        constexpr TileConfig kTile = kTiles[kTileIndex];
        if constexpr (kTile.head_dim == kHeadDim) {
            if (plan.tile.block_m == kTile.block_m && plan.tile.block_n == kTile.block_n &&
                plan.tile.stages == kTile.stages) {
                return run_kernel<Element, kTileIndex>(problem, tensors, partials, stream);
            }
        }
        run_planned<Element, kHeadDim, kTileIndex + 1>(plan, problem, tensors, partials, stream);
    }
}

// One translation unit's kernels: every tile and dtype of a head_dim.
template <int kHeadDim>
void run_hdim(const Plan& plan, const Problem& problem, const Tensors& tensors,
              const Partials& partials, Stream stream) {
    if (problem.dtype_q == DType::kFloat16) {
        run_planned<cutlass::half_t, kHeadDim>(plan, problem, tensors, partials, stream);
    } else {
        run_planned<cutlass::bfloat16_t, kHeadDim>(plan, problem, tensors, partials, stream);
    }
}

}  // namespace fa101::split_d
