// The tiles of each head_dim, with their reasons. Changes speed, never results. Plain C++: the
// planner and the kernels both read it.
#pragma once

#include <algorithm>

namespace fa101::split_d {

constexpr int kNumWarps = 8;
constexpr int kMaxHeadDim = 1024;

struct TileConfig {
    int head_dim;    // smaller ones are padded; a multiple of the 64 columns of a panel
    int block_m;     // queries of a block, 32 a row group
    int block_n;     // keys of one step
    int key_groups;  // the warps of a row group share Q K^T by keys and, beyond that, by D
    int stages;      // 2: K and V each have a buffer; 1: they take turns in one, nothing overlaps

    constexpr int row_groups() const { return block_m / 32; }
    constexpr int group_warps() const { return kNumWarps / row_groups(); }
    constexpr int dim_groups() const { return group_warps() / key_groups; }
    // 16 x 8 tiles of partial logits that a warp sends to others; of two warps each keeps half.
    constexpr int sent_tiles() const {
        return (dim_groups() == 2 ? 1 : 2) * (block_n / key_groups / 8);
    }
    // Of a row group: what its warps send (512 bytes a tile), then P in its place.
    constexpr int exchange_bytes() const { return 512 * sent_tiles() * group_warps(); }
    constexpr int weights_bytes() const { return 32 * (2 * block_n + 16); }
    constexpr int scratch_bytes() const {
        return stages == 1 ? weights_bytes() : std::max(exchange_bytes(), weights_bytes());
    }
    // A float for every row and part of the keys: maxima, later sums.
    constexpr int row_bytes() const { return 4 * 32 * kNumWarps / 2; }
    constexpr int smem_bytes() const {
        return 2 * head_dim * (block_m + stages * block_n) + row_groups() * scratch_bytes() +
               row_bytes();
    }
};

// Of a head_dim, the largest first; the planner weighs those that fit into shared memory.
// clang-format off
constexpr TileConfig kTiles[] = {
    {320, 128, 32, 1, 2},   // O of 128 queries fits: half the bytes from L2
    {320, 64, 64, 2, 2},
    {320, 64, 32, 2, 2},    // 88 KB: sm_86, sm_89, sm_120 (99 KB a block)
    {384, 64, 64, 2, 2},
    {384, 32, 16, 1, 2},    // 64 KB
    {512, 64, 64, 2, 2},
    {512, 64, 32, 2, 2},    // 136 KB: sm_80 (163 KB a block)
    {512, 32, 32, 1, 2},    // twice the blocks where there are few queries
    {512, 32, 16, 1, 2},    // 80 KB
    {640, 64, 32, 2, 2},
    {640, 32, 32, 1, 2},    // 152 KB; and twice the blocks
    {640, 32, 16, 1, 2},    // 96 KB
    {768, 64, 32, 2, 2},
    {768, 32, 16, 1, 2},    // 112 KB; and twice the blocks
    {768, 32, 16, 1, 1},    // 74 KB
    {1024, 32, 32, 1, 2},
    {1024, 32, 16, 1, 2},   // 144 KB
    {1024, 32, 16, 1, 1},   // 98 KB
};
// clang-format on

}  // namespace fa101::split_d
