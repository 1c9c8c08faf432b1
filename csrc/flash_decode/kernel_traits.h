// The numbers of one tile of the kernel that splits the keys: who copies what, and where it lies in
// shared memory.
#pragma once

#include "common/key_rows.h"
#include "flash_decode/tile_config.h"

#include <cstdint>
#include <type_traits>

namespace fa101::flash_decode {

template <class Element_, int kTileIndex>
struct Traits {
    using Element = Element_;  // of Q, O and the products
    static constexpr TileConfig kTile = kTiles[kTileIndex];
    static constexpr bool kFp8 = kTile.kv_bytes == 1;
    using Stored = std::conditional_t<kFp8, uint8_t, Element>;  // of K and V
    static constexpr int kHeadDim = kTile.head_dim;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr int kNThreads = 32 * kTile.num_warps;
    static constexpr int kNumTeams = kTile.num_teams();
    static constexpr int kTeamThreads = kNThreads / kNumTeams;
    static constexpr bool kQInRegisters = kTile.q_in_registers();
    static constexpr int kSmemBytes = kTile.smem_bytes();
    static constexpr int kSmemBytesKV = kTile.smem_bytes_kv();

    static_assert(kBlockM * kNumTeams == 16 * kTile.num_warps, "a warp owns 16 rows");
    static_assert(kBlockN % 16 == 0 && kHeadDim % 32 == 0, "ldmatrix.x4 brings 16 x 32 bytes");

    // A tile of K or V is rows of kHeadDim elements in pieces of 16 bytes, the pieces permuted by
    // XOR with the row number, so that 8 rows' pieces of one column (ldmatrix) and 8 pieces of one
    // row (cp.async) both touch all 32 banks once.
    static constexpr int kTileElements = kBlockN * kHeadDim;
    static constexpr int kPieceCols = 16 / kTile.kv_bytes;
    static constexpr bool kWholeLines =
        kHeadDim * kTile.kv_bytes % 128 == 0;  // of 128 bytes, a row
    // The piece's place in its row, and in the tile.
    static __device__ __forceinline__ int column(int row, int piece) {
        return kPieceCols * (piece ^ (kWholeLines ? row % 8 : row / 2 % 4));
    }
    static __device__ __forceinline__ int offset(int row, int piece) {
        return row * kHeadDim + column(row, piece);
    }

    // Copies: kPieces threads read neighbouring pieces of a row, the team so many rows at a time.
    static constexpr int kPieces = kWholeLines ? 8 : 4;
    static constexpr int kRowsPerPass = kTeamThreads / kPieces;
    static constexpr int kPasses = kBlockN / kRowsPerPass;
    static constexpr int kPanels = kHeadDim / (kPieceCols * kPieces);
    static_assert(kBlockN % kRowsPerPass == 0, "every thread copies as much");

    // In a paged cache 16 keys share a page: those of several passes, or the one of each pass.
    static constexpr int kPassesPerPage =
        kRowsPerPass < kMinPageSize ? kMinPageSize / kRowsPerPass : 1;
    static constexpr int kPagesPerStep = kPasses / kPassesPerPage;
    static_assert(kPagesPerStep * kPassesPerPage == kPasses, "no step ends within 16 keys");
    static constexpr int page_of_pass(int pass) { return pass / kPassesPerPage; }
    // A row of the i-th of them that the thread copies whose first row is first_row.
    static __device__ __forceinline__ int first_row_of_page(int first_row, int i) {
        return first_row + i * kPassesPerPage * kRowsPerPass;
    }

    // The merge of the teams: rows of O in float32; the padding spreads 8 rows over the banks.
    static constexpr int kStrideO = kHeadDim + 8;
};

}  // namespace fa101::flash_decode
