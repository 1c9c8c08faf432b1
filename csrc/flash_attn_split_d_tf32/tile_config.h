// The tiles of each head_dim, with their reasons. Changes speed, never results. Plain C++: the
// planner and the kernels both read it.
#pragma once

#include <algorithm>

namespace fa101::split_d_tf32 {

constexpr int kNumWarps = 8;
constexpr int kBlockN = 16;  // keys of one step: the depth of one sum in P V

struct TileConfig {
    int head_dim;  // smaller ones are padded; each warp has a slice of it
    int block_m;   // queries of a block
    int piece;     // columns of a slice that are in shared memory at a time, of K or of V
    int slots;     // such pieces of a warp

    constexpr int slice() const { return head_dim / kNumWarps; }
    // Floats between two rows in shared memory, as in flash_attn_tf32.
    constexpr int stride() const { return piece + 4; }
    constexpr int q_stride() const { return slice() + 4; }
    constexpr int weights_stride() const { return kBlockN + 4; }
    // A warp's partial logits take the place of its last piece of K.
    constexpr int slot_floats() const { return kBlockN * std::max(stride(), block_m); }
    // Of every warp Q and the slots; of the block P and a number for each row.
    constexpr int smem_bytes() const {
        return 4 * (kNumWarps * (block_m * q_stride() + slots * slot_floats()) +
                    block_m * (weights_stride() + 1));
    }
    // O of 16 queries leaves registers and shared memory for two up to 512.
    constexpr int blocks_per_sm() const { return block_m == 16 && head_dim <= 512 ? 2 : 1; }
};

// Of a head_dim, the most queries first; the planner takes the first that fits into shared memory
// and is not for twice as many queries as there are.
// clang-format off
constexpr TileConfig kTiles[] = {
    { 384, 64, 48, 3},   // 205 KB
    { 384, 32, 48, 2},   // 107 KB: sm_80 (163 KB a block)
    { 384, 16, 48, 2},   //  79 KB: sm_86, sm_89, sm_120 (99 KB a block)
    { 512, 64, 64, 2},   // 209 KB
    { 512, 32, 64, 2},   // 139 KB
    { 512, 16, 32, 3},   //  89 KB
    { 768, 32, 48, 3},   // 181 KB: O of 64 queries would take 192 registers
    { 768, 32, 48, 2},   // 155 KB
    { 768, 16, 48, 4},   // 155 KB
    { 768, 16, 32, 2},   //  87 KB
    {1024, 32, 64, 2},   // 203 KB
    {1024, 16, 64, 4},   // 203 KB
    {1024, 16, 64, 2},   // 135 KB
    {1024, 16, 16, 3},   //  97 KB
};
// clang-format on

constexpr int kMaxHeadDim = 1024;

}  // namespace fa101::split_d_tf32
