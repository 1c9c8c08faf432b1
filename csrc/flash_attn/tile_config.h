// The tile of each head_dim, with its reason. Changes speed, never results. Plain C++: the planner
// and the kernels both read it. The measurements behind it are in docs/performance-log.md.
#pragma once

namespace fa101::fa2_cute {

struct TileConfig {
    int head_dim;         // smaller ones are padded with zeros
    int block_m;          // queries of a block
    int block_n;          // keys of one step
    int block_n_extras;   // the same with softcap, bias or mask, which need registers of their own
    int num_warps;        // each has block_m / num_warps consecutive queries, but see warps_n
    int stages;           // K and V tiles in shared memory
    bool q_in_registers;  // Q is read from shared memory once instead of in every step
    int blocks_per_sm;    // caps the registers a thread may use: 65536 / (32 * num_warps * this)
    int warps_n;          // 2: pairs of warps share twice the queries, each takes half the keys

    // Q, and K and V of all stages, in 16-bit elements; pairs have P and a number for every row.
    constexpr int smem_bytes() const {
        return 2 * head_dim * (block_m + 2 * stages * block_n) +
               (warps_n == 1 ? 0 : block_m * (2 * block_n + 4 * warps_n));
    }

    constexpr TileConfig with_extras() const {
        TileConfig tile = *this;
        tile.block_n = block_n_extras;
        return tile;
    }
};

// In order of preference; the first that holds the head_dim and fits into shared memory is taken.
// Zero spills decide much here: O and S of one warp alone take 192 of 255 registers at 128 x 64 for
// head_dim 128, which spills; 48 keys leave room, and two blocks fit into the 164 KB of an A100.
// The elements of bias and mask that a thread has asked for and not got yet wait in registers too.
// From head_dim 192 on 32 rows are too many for one warp, and 16 too few for shared memory to keep
// up: pairs.
// clang-format off
constexpr TileConfig kTiles[] = {
    {64, 128, 64, 48, 4, 3, true, 2, 1},
    {96, 128, 64, 64, 4, 2, false, 2, 1},
    {128, 128, 48, 32, 4, 2, false, 2, 1},
    {192, 128, 64, 64, 8, 2, false, 1, 2},  // 161 KB
    {192, 64, 32, 32, 4, 2, false, 2, 1},  // 72 KB: sm_86, sm_89
    {256, 128, 64, 64, 8, 2, false, 1, 2},  // 209 KB
    {256, 64, 32, 32, 4, 2, false, 2, 1},  // 96 KB: sm_80 (163 KB a block), sm_86, sm_89 (99 KB)
};
// clang-format on

}  // namespace fa101::fa2_cute
