// Host side of the kernel that splits the keys: the tile of a plan, and the launch.
#pragma once

#include <fa101/error.h>
#include <fa101/kv_cache.h>

#include "common/launch.h"
#include "common/mask.h"
#include "flash_decode/family.h"
#include "flash_decode/kernel.cuh"
#include "flash_decode/kernel_traits.h"
#include "flash_decode/splits.h"

#include <cstdint>
#include <iterator>
#include <string>

namespace fa101::flash_decode {

template <class Traits, bool kPaged>
void run_kernel(const Problem& problem, const Tensors& tensors, const Partials& partials,
                const AppendParams& new_keys, Stream stream) {
    const auto kernel = flash_decode_kernel<Traits, kPaged>;
    const int64_t merges = partials.num_splits == 1
                               ? 0
                               : ceil_div<int64_t>(result_rows(problem), partials.rows_per_merge);
    const int64_t grid = partials.key_blocks + merges;
    // Starts early, but not where unsplit blocks can have a multiprocessor each: 128 of them (batch
    // 16 of 8k keys) lose 5 % on an H200, probably as blocks that start early go in pairs to the
    // few that are idle then. 128 blocks of split keys gain 3 % (4096 keys at batch 1). The later
    // launch alone decides: more blocks share multiprocessors whatever was there before.
    const bool early =
        partials.num_splits > 1 || partials.key_blocks > count_sms(tensors.device_index);
    launch_dependent(early, kernel, "flash_decode_kernel", grid, Traits::kNThreads,
                     Traits::kSmemBytes, stream, problem, tensors, partials, new_keys);
}

// Runs the tile of the table that the plan names, of those for kHeadDim.
template <int kHeadDim, int kTileIndex = 0>
void run_hdim(const Plan& plan, const Problem& problem, const Tensors& tensors,
              const Partials& partials, const AppendParams& new_keys, Stream stream) {
    if constexpr (kTileIndex == std::size(kTiles)) {
        throw Unsupported("fa2_cute split_kv has no tile of " + std::to_string(plan.tile.block_m) +
                          " rows for head_dim " + std::to_string(kHeadDim));
    } else {
        if constexpr (kTiles[kTileIndex].head_dim == kHeadDim) {
            constexpr TileConfig kTile = kTiles[kTileIndex];
            if (plan.tile.block_m == kTile.block_m && size_of(problem.dtype_kv) == kTile.kv_bytes) {
                const auto run = [&](auto element) {
                    using TileTraits = Traits<decltype(element), kTileIndex>;
                    const bool is_paged = problem.page_size > 0 || TileTraits::kFp8;
                    const auto kernel = is_paged ? run_kernel<TileTraits, true>
                                                 : run_kernel<TileTraits, TileTraits::kFp8>;
                    kernel(problem, tensors, partials, new_keys, stream);
                };
                if (problem.dtype_q == DType::kFloat16) {
                    run(__half{});
                } else {
                    run(__nv_bfloat16{});
                }
                return;
            }
        }
        run_hdim<kHeadDim, kTileIndex + 1>(plan, problem, tensors, partials, new_keys, stream);
    }
}

}  // namespace fa101::flash_decode
