// The tiles of each head_dim, with their reasons. Changes speed, never results. Plain C++: the
// planner and the kernels both read it.
#pragma once

#include <algorithm>

namespace fa101::decode_tf32 {

struct TileConfig {
    int head_dim;   // smaller ones are padded with zeros
    int block_m;    // rows of a block: (query, head of the group) pairs
    int block_n;    // keys of a team's step
    int num_warps;  // with 16 rows each is a team of its own, with 64 all are one
    int slots;      // tiles of a team in shared memory, of K and V in turn

    constexpr int num_teams() const { return block_m == 16 ? num_warps : 1; }
    // Floats between two rows in shared memory, as in flash_attn_tf32.
    constexpr int stride() const { return head_dim + 4; }
    // Q, and every team's slots; at the end, in their place, O of every team, m and l.
    constexpr int smem_bytes() const {
        const int loop = stride() * (block_m + num_teams() * slots * block_n);
        return 4 * std::max(loop, num_teams() * block_m * (stride() + 2));
    }
};

// In order of preference, of those for as many rows; the first that holds the head_dim and fits
// into shared memory is taken. All but one of the slots are on their way: in the first of each,
// with two blocks a multiprocessor up to head_dim 128, 100 KB and more, where an H200's 4.8 TB/s
// over 132 multiprocessors times a microsecond ask for 36 KB.
// clang-format off
constexpr TileConfig kTiles[] = {
    { 64, 16, 32, 4, 3},   // 106 KB
    { 64, 16, 32, 4, 2},   //  72 KB: sm_86, sm_89, sm_120 (99 KB a block)
    { 64, 64, 32, 4, 6},   //  68 KB
    {128, 16, 16, 4, 3},   // 107 KB
    {128, 16, 16, 4, 2},   //  74 KB
    {128, 64, 32, 4, 4},   //  99 KB
    {256, 16, 16, 4, 3},   // 211 KB
    {256, 16, 16, 4, 2},   // 146 KB: sm_80 (163 KB a block)
    {256, 16, 16, 2, 2},   //  81 KB
    {256, 64, 16, 4, 2},   //  98 KB
};
// clang-format on

}  // namespace fa101::decode_tf32
