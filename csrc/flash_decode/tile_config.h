// The tiles of each head_dim, with their reasons. Changes speed, never results. Plain C++: the
// planner and the kernels both read it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fa101::flash_decode {

struct TileConfig {
    int head_dim;  // smaller ones are padded with zeros
    int block_m;   // rows of a block: (query, head of the group) pairs
    int block_n;   // keys of a team's step
    int num_warps;
    int stages;        // K and V tiles of a team in shared memory
    int kv_bytes = 2;  // of an element of K and V; 1: fp8

    // With 16 rows there is nothing to share but the keys: each warp is a team of its own. With
    // 64 each warp owns 16 rows, and all of them read the same keys.
    constexpr int num_teams() const { return block_m == 16 ? num_warps : 1; }

    // O of 16 rows takes head_dim / 2 registers, Q half as many: together too many at 256.
    constexpr bool q_in_registers() const { return head_dim < 256; }

    // K and V of all stages; then what each warp keeps of Q, in 16-bit elements. At the end, in
    // their place, O of every warp in float32 (8 columns of padding against bank conflicts), m, l.
    constexpr int smem_bytes_kv() const {
        return 2 * kv_bytes * head_dim * num_teams() * stages * block_n;
    }
    constexpr int smem_bytes() const {
        const int loop = smem_bytes_kv() + (q_in_registers() ? 0 : 2 * 16 * num_warps * head_dim);
        return std::max(loop, 4 * 16 * num_warps * (head_dim + 8 + 2));
    }
};

// For each head_dim the tile of up to 16 rows, then that of more. At most 96 KB each: two blocks
// fit an H200's multiprocessor, one fits any other. All but one of the stages are on their way:
// half of that or more, where 4.8 TB/s over 132 multiprocessors times a microsecond ask for 36 KB.
// clang-format off
constexpr TileConfig kTiles[] = {
    { 64, 16, 32, 4, 3},   // 96 KB
    { 64, 64, 64, 4, 4},   // 64 KB
    { 96, 16, 16, 4, 4},   // 96 KB
    { 96, 64, 64, 4, 3},   // 72 KB
    {128, 16, 16, 4, 3},   // 96 KB
    {128, 64, 64, 4, 3},   // 96 KB
    {192, 16, 16, 4, 2},   // 96 KB
    {192, 64, 32, 4, 4},   // 96 KB
    {256, 16, 16, 2, 2},   // 80 KB: four warps would need 160
    {256, 64, 32, 4, 2},   // 96 KB
    // In fp8, of which three widths are compiled. Up to 16 rows as many bytes are more keys or stages.
    { 64, 16, 32, 4, 6, 1},   // 96 KB
    { 64, 64, 64, 4, 4, 1},   // 32 KB
    {128, 16, 32, 4, 3, 1},   // 96 KB
    {128, 64, 64, 4, 3, 1},   // 48 KB
    {256, 16, 16, 4, 2, 1},   // 96 KB
    {256, 64, 32, 4, 4, 1},   // 96 KB
};
// clang-format on

}  // namespace fa101::flash_decode
