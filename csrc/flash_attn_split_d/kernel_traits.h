// The numbers and types of one tile of split_d: who multiplies what, and where it is in shared
// memory.
#pragma once

#include "flash_attn_split_d/tile_config.h"

#include <cute/arch/mma_sm80.hpp>
#include <cute/config.hpp>
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <type_traits>

namespace fa101::split_d {

// A tile lies in shared memory as panels of 64 columns, 128 bytes a row. Its 16-byte pieces are
// permuted by XOR with the row number, so that reading 8 rows of one column (ldmatrix) and writing
// 8 pieces of one row (cp.async) both touch all 32 banks once.
constexpr int kPanel = 64, kPanelRowBytes = 2 * kPanel;

// kWarps warps share the columns of a tile 16 at a time: up to four warps divide every panel, eight
// every pair of panels. So all have as much to do whatever head_dim is, and the place of a warp's
// columns within a panel is the same in all of them.
template <int kWarps>
struct PanelShare {
    static constexpr int kSteps = kWarps < 4 ? 4 / kWarps : 1;  // of 16 columns, in each panel
    static constexpr int kPanelStride = kWarps > 4 ? kWarps / 4 : 1;
    CUTE_HOST_DEVICE static constexpr int first_step(int warp) { return warp % 4 * kSteps; }
    CUTE_HOST_DEVICE static constexpr int first_panel(int warp) { return warp / 4; }
};

template <class Element_, int kTileIndex>
struct Traits {
    using Element = Element_;
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                   cute::SM80_16x8x16_F32F16F16F32_TN,
                                   cute::SM80_16x8x16_F32BF16BF16F32_TN>;

    static constexpr TileConfig kTile = kTiles[kTileIndex];
    static constexpr int kHeadDim = kTile.head_dim;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr int kNThreads = 32 * kNumWarps;
    static constexpr int kPanels = kHeadDim / kPanel;

    // The warps of a row group share the same 32 queries.
    static constexpr int kRowGroups = kTile.row_groups();
    static constexpr int kGroupWarps = kTile.group_warps();

    // S = Q K^T: a warp has kGroupKeys keys, kKeyTiles tiles of 8, and a part of D.
    static constexpr int kDimGroups = kTile.dim_groups();
    static constexpr int kGroupKeys = kBlockN / kTile.key_groups;
    static constexpr int kKeyTiles = kGroupKeys / 8;
    using DimShare = PanelShare<kDimGroups>;
    // Panels of one step of the loop: two steps of 16 columns at least, where that divides them.
    static constexpr int kUnroll =
        DimShare::kSteps == 1 && kPanels / DimShare::kPanelStride % 2 == 0 ? 2 : 1;
    static constexpr int kLoopPanels = kUnroll * DimShare::kPanelStride;

    // The softmax: warp d of those that share D owns one of two row tiles (d % 2) and
    // kOwnTiles of the key tiles (d / 2); with few keys not all warps have some.
    static constexpr int kOwners = std::min(kDimGroups / 2, kKeyTiles);
    static constexpr int kOwnTiles = kKeyTiles / kOwners;
    static constexpr int kKeyParts = kTile.key_groups * kOwners;  // warps that share a row

    // O = P V: a warp has kSlices slices of 16 columns.
    using ColumnShare = PanelShare<kGroupWarps>;
    static constexpr int kWarpPanels = kPanels / ColumnShare::kPanelStride;
    static constexpr int kSlices = kWarpPanels * ColumnShare::kSteps;

    static_assert(kHeadDim % kPanel == 0 && kBlockM % 32 == 0 && kGroupKeys % 16 == 0);
    static_assert(kDimGroups >= 2, "two warps at least, one for each row tile");
    static_assert(kPanels % kLoopPanels == 0 && kPanels % ColumnShare::kPanelStride == 0);
    static_assert(kStages == 2 || kRowGroups == 1, "the turns in one buffer are the group's");

    // Shared memory, in bytes. O leaves through the memory of Q. Rows of P are padded by 16 bytes,
    // which keeps ldmatrix free of bank conflicts.
    static constexpr int kKvBytes = 2 * kBlockN * kHeadDim;
    static constexpr int kWeightsPitch = 2 * kBlockN + 16;
    static constexpr int kOffsetK = 2 * kBlockM * kHeadDim;
    static constexpr int kOffsetV = kOffsetK + (kStages == 2 ? kKvBytes : 0);
    static constexpr int kOffsetScratch = kOffsetV + kKvBytes;
    static constexpr int kOffsetExchange = kStages == 2 ? kOffsetScratch : kOffsetK;
    static constexpr int kOffsetRows = kOffsetScratch + kRowGroups * kTile.scratch_bytes();
    static constexpr int kSmemBytes = kOffsetRows + kTile.row_bytes();
    static_assert(kSmemBytes == kTile.smem_bytes(), "the planner counts the same bytes");
    static_assert(kStages == 2 || kTile.exchange_bytes() <= kKvBytes);
};

}  // namespace fa101::split_d
