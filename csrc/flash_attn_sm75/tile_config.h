// The tile of each head_dim, with its reason. Changes speed, never results. Plain C++: the planner
// and the kernels both read it.
#pragma once

namespace fa101::sm75 {

struct TileConfig {
    int head_dim;  // smaller ones are padded with zeros
    int block_m;   // queries of a block, 16 a warp
    int block_n;   // keys of one step
    int num_warps;
    int blocks_per_sm;  // caps the registers a thread may use: 65536 / (32 * num_warps * this)

    // Halves between two rows in shared memory; the 8 more put the 8 rows that ldmatrix reads at
    // once into different banks.
    constexpr int stride() const { return head_dim + 8; }
    // One block of K and V. Q comes through the same memory, on its way to registers.
    constexpr int smem_bytes() const { return 2 * stride() * 2 * block_n; }
};

// Small, so that two blocks share a multiprocessor: one computes while the other loads.
// clang-format off
constexpr TileConfig kTiles[] = {
    {64, 64, 64, 4, 2},   // 18 KB
    {128, 64, 32, 4, 2},  // 17 KB
    {256, 64, 32, 4, 2},  // 33 KB
};
// clang-format on

}  // namespace fa101::sm75
