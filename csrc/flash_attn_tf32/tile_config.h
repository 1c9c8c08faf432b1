// The tile of each head_dim, with its reason. Changes speed, never results. Plain C++: the planner
// and the kernels both read it.
#pragma once

namespace fa101::tf32 {

struct TileConfig {
    int head_dim;       // smaller ones are padded with zeros
    int block_m;        // queries of a block
    int block_n;        // keys of one step
    int num_warps;      // each has block_m / num_warps consecutive queries, 16 or 32
    int blocks_per_sm;  // caps the registers a thread may use: 65536 / (32 * num_warps * this)

    // Floats between two rows in shared memory. The 4 more put both 8 rows of one 16-byte column
    // (ldmatrix: Q, K) and 8-byte pieces of every second row (V) into different banks.
    constexpr int stride() const { return head_dim + 4; }
    // Q, and one block of K and V.
    constexpr int smem_bytes() const { return 4 * stride() * (block_m + 2 * block_n); }
};

// In order of preference; the first that holds the head_dim and fits into shared memory is taken.
// 32 rows a warp halve the cost of loading and splitting K and V; at head_dim 256 O leaves no
// registers for more than 16.
// clang-format off
constexpr TileConfig kTiles[] = {
    {64, 128, 64, 4, 2},    //  68 KB
    {128, 128, 32, 4, 2},   //  99 KB
    {256, 128, 32, 8, 1},   // 195 KB: sm_90, sm_100
    {256, 64, 16, 4, 2},    //  97.5 KB: sm_80, sm_86, sm_89, sm_120
};
// clang-format on

}  // namespace fa101::tf32
