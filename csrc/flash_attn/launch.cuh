// Host side of the tensor-core kernel: from a tile's numbers to its types, and the launch.
#pragma once

#include <fa101/error.h>

#include "common/launch.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/tile_order.h"
#include "flash_attn/family.h"
#include "flash_attn/kernel.cuh"
#include "flash_attn/kernel_traits.h"
#include "flash_attn/tile_config.h"

#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>

namespace fa101::fa2_cute {

template <class Element, int kTileIndex, bool kHasExtras>
void run_kernel(const Problem& problem, const Tensors& tensors, Stream stream) {
    constexpr TileConfig kTile = kHasExtras ? kTiles[kTileIndex].with_extras() : kTiles[kTileIndex];
    using Traits =
        Fa2CuteTraits<Element, kTile.head_dim, kTile.block_m, kTile.block_n, kTile.num_warps,
                      kTile.stages, kTile.q_in_registers, kTile.blocks_per_sm, kTile.warps_n>;
    constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
    static_assert(kSmemBytes == kTile.smem_bytes(), "the planner counts the same bytes");
    const auto kernel = fa2_cute_kernel<Traits, kHasExtras>;
    const int64_t grid =
        problem.batch * problem.num_heads * ceil_div<int64_t>(problem.seqlen_q, kTile.block_m);
    // A negative scale flips the sign of Q, and 0 makes Q zero, so that the kernel's is positive.
    const float scale = problem.softmax_scale;
    const LogitScale logit_scale{scale == 0.0f ? 1.0f : std::fabs(scale) * kLog2e,
                                 std::fabs(scale) / problem.softcap, problem.softcap * kLog2e};
    allow_shared_memory(kernel, "fa2_cute_kernel", kSmemBytes);
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, kSmemBytes,
             static_cast<cudaStream_t>(stream)>>>(problem, tensors, logit_scale,
                                                  section_heads(problem));
    check_launch("fa2_cute_kernel", grid, Traits::kNThreads, kSmemBytes);
}

// Runs the tile of the table that the plan names, of those for kHeadDim.
template <class Element, int kHeadDim, int kTileIndex = 0>
void run_planned(const Plan& plan, const Problem& problem, const Tensors& tensors, Stream stream) {
    if constexpr (kTileIndex == std::size(kTiles)) {
        throw Unsupported("fa2_cute has no tile of " + std::to_string(plan.tile.block_m) +
                          " queries for head_dim " + std::to_string(kHeadDim));
    } else {
        if constexpr (kTiles[kTileIndex].head_dim == kHeadDim) {
            if (plan.tile.block_m == kTiles[kTileIndex].block_m) {
                if (has_extras(problem)) {
                    return run_kernel<Element, kTileIndex, true>(problem, tensors, stream);
                }
                return run_kernel<Element, kTileIndex, false>(problem, tensors, stream);
            }
        }
        run_planned<Element, kHeadDim, kTileIndex + 1>(plan, problem, tensors, stream);
    }
}

// One translation unit's kernels: every tile and dtype of a head_dim.
template <int kHeadDim>
void run_hdim(const Plan& plan, const Problem& problem, const Tensors& tensors, Stream stream) {
    if (problem.dtype_q == DType::kFloat16) {
        run_planned<cutlass::half_t, kHeadDim>(plan, problem, tensors, stream);
    } else {
        run_planned<cutlass::bfloat16_t, kHeadDim>(plan, problem, tensors, stream);
    }
}

}  // namespace fa101::fa2_cute
