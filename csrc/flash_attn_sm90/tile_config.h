// Which of the compiled kernels answers a problem. Changes speed, never results. Plain C++: the
// planner and the launcher both read it. The measurements behind it are in kernel.cuh.
#pragma once

#include <fa101/params.h>
#include <fa101/plan.h>

#include "common/mask.h"

#include <algorithm>
#include <cstdint>

namespace fa101::sm90 {

// The compiled tiles, the smallest first; TMA pads smaller problems with zeros. 192 x 128 is what
// DeepSeek's multi-head latent attention asks for at prefill.
struct HeadDims {
    int qk, v;
};
constexpr HeadDims kHeadDims[] = {{64, 64},   {96, 96},   {128, 128},
                                  {192, 128}, {192, 192}, {256, 256}};

// Columns of TMA's boxes: a swizzle of 128 bytes, or of 64 where the head_dim wants that.
constexpr int box_columns(int head_dim) { return head_dim % 64 == 0 ? 64 : 32; }

struct Config {
    int groups;   // consumer warpgroups, of 64 query rows each
    int block_n;  // keys of one step
    int blocks_per_sm = 1;
    int stages = 2;  // K and V blocks in shared memory, each
    // A block has one tile, all of whose keys fit into the stages: it has no producer.
    bool at_once = false;

    constexpr int block_m() const { return 64 * groups; }
    constexpr int num_warps() const { return 4 * (groups + (at_once ? 0 : 1)); }
};

// Two groups: 232 registers a thread and more. 128 columns of S take 64 of them, as much as O at
// head_dim 128. At 192 it is shared memory that ends at 112 keys. At 256, where 80 fitted before O
// had boxes of its own, 64 were as fast or faster: rows end at multiples of them.
constexpr Config two_groups(int head_dim, int head_dim_v) {
    if (head_dim == 256) return {2, 64};
    if (head_dim_v == 192) return {2, 112};
    return {2, 128};
}

// One where a tile of a chunk has up to 64 rows: the other would compute nothing, and be waited
// for.
constexpr Config one_group(int head_dim, int head_dim_v) {
    Config config = two_groups(head_dim, head_dim_v);
    config.groups = 1;
    return config;
}

// Three groups hide more of each other's waiting, as long as the registers last: 160 a thread, so
// at 96 they hold S of 112 keys, at 128 of only 80, and beyond, where O takes 96 or 128 or shared
// memory ends, there are two.
constexpr Config most_groups(int head_dim, int head_dim_v) {
    if (head_dim == 64) return {3, 128};
    if (head_dim == 96) return {3, 112};
    if (head_dim == 128) return {3, 80};
    return two_groups(head_dim, head_dim_v);
}

// Two blocks a multiprocessor for tiles that are over soon: one loads its first keys and writes O
// while the other computes. 104 registers a thread leave room for head_dim 64 and 48 keys.
// A load takes longer than so short a step: four stages keep more of them under way.
constexpr Config kTwins = {2, 48, 2, 4};
// And for tiles of up to 256 keys. Without a producer 128 registers a thread are left, for 64 keys;
// two blocks take all of the shared memory.
constexpr Config kAtOnce = {2, 64, 2, 4, /*at_once=*/true};
constexpr int64_t kAtOnceKeys = kAtOnce.stages * kAtOnce.block_n;
constexpr int kTwoBlocksHeadDim = 64;

constexpr Config twins(int head_dim, int head_dim_v) {
    return head_dim == kTwoBlocksHeadDim ? kTwins : two_groups(head_dim, head_dim_v);
}
constexpr Config at_once(int head_dim, int head_dim_v) {
    return head_dim == kTwoBlocksHeadDim ? kAtOnce : two_groups(head_dim, head_dim_v);
}

// A window or softcap: kernels of their own, one for both, as a window's bounds and the tanh take
// registers and instructions that the plain ones lack. They have two groups. So do problems without
// keys: kernels whose tiles start ahead load a block for each, and there is none.
inline bool has_extras(const Problem& p) {
    return p.has_left_bound() || p.softcap > 0 || p.seqlen_k == 0;
}

// Packed heads: neighbours that share a key/value head, and whose queries are rows of one tile,
// query by query: row r is query r / heads of head r % heads. A power of two, up to the 16 rows
// that a warp writes with one box. The packed problem is for counting tiles: its mask still counts
// queries.
inline Problem pack_heads(Problem p, int heads) {
    p.num_heads /= heads;
    p.seqlen_q *= heads;
    return p;
}

inline int64_t num_tiles(const Problem& p, int block_m) {
    return p.batch * p.num_heads * ceil_div<int64_t>(p.seqlen_q, block_m);
}

// All that divide the group, if that saves a tenth of the tiles, as few queries do not fill one, or
// steps: a causal tile of few queries ends closer to the diagonal, which pays where steps are as
// short as those of twins. The capacity of a cache does not count.
inline int packed_heads_for(const Problem& p, HeadDims tile) {
    constexpr int kMost = 16, kBlockM = 128;
    int heads = 1;
    while (heads < kMost && p.group_size() % (2 * heads) == 0) heads *= 2;
    const int64_t tiles = num_tiles(p, kBlockM);
    const bool saves_tiles = 10 * num_tiles(pack_heads(p, heads), kBlockM) <= 9 * tiles;
    const bool saves_steps = tile.qk == kTwoBlocksHeadDim && p.has_right_bound() &&
                             !p.has_seqlens_k && std::max(p.seqlen_q, p.seqlen_k) <= 1024;
    return saves_tiles || saves_steps ? heads : 1;
}

inline Config config_for(const Problem& p, int num_sms, HeadDims tile, int packed_heads) {
    const int head_dim = tile.qk;
    const Config two = two_groups(tile.qk, tile.v);
    if (has_extras(p)) return two;
    const Problem packed = pack_heads(p, packed_heads);
    // Rows that tiles of so many groups compute, the empty ones of the last tile among them.
    const auto rows = [&packed](int64_t groups) {
        return groups * 64 * ceil_div<int64_t>(packed.seqlen_q, groups * 64);
    };
    const int64_t tiles = num_tiles(packed, 128);
    if (head_dim == kTwoBlocksHeadDim && p.seqlen_k <= kAtOnceKeys) {
        // Of many tiles the better steps are those that waste less of the last.
        const auto steps_end = [&](const Config& c) {
            return c.block_n * ceil_div<int64_t>(p.seqlen_k, c.block_n);
        };
        if (tiles <= 2 * num_sms || steps_end(kAtOnce) <= steps_end(kTwins)) return kAtOnce;
    }
    if (head_dim == kTwoBlocksHeadDim && p.seqlen_k <= 1024 && tiles > num_sms) return kTwins;
    // Each SM has one tile at most: the shorter ends earlier.
    if (tiles <= num_sms) return two;
    // Their steps are better from so many keys on, the ends of their tiles before that.
    const int64_t keys = head_dim == 64        ? 0
                         : head_dim == 96      ? 1024
                         : p.has_right_bound() ? 4096
                                               : 1024;
    // Few tiles run in waves, as long as their rows are many; three groups do more at a time.
    const auto waves = [&](int groups) {
        return groups * ceil_div<int64_t>(num_tiles(packed, 64 * groups), num_sms);
    };
    const bool fits = tiles <= 4 * num_sms
                          ? 100 * waves(3) <= (head_dim == 64 ? 125 : 100) * waves(2)
                          : 4 * rows(3) <= 5 * rows(2);
    const bool three = head_dim <= 128 && p.seqlen_k > keys && fits;
    return three ? most_groups(tile.qk, tile.v) : two;
}

// Blocks of a part, or more, where keys are split: some 256 keys, unless num_splits is given.
inline int min_blocks_of_part(const Problem& p, int block_n) {
    return p.num_splits > 0 ? 1 : 256 / block_n;
}

// Blocks fetch the number of their next tile from a counter in the workspace, but where they have
// one tile each, as all tiles run at the same time on an H200 or kAtOnce says so.
constexpr int kTileCounterBytes = 16;
inline bool has_counter(const Tile& tile, const Problem& p) {
    const int64_t tiles = num_tiles(pack_heads(p, tile.packed_heads), tile.block_m);
    const bool may_be_two = tile.head_dim == kTwoBlocksHeadDim;
    if (may_be_two && tile.block_n == kAtOnce.block_n) return false;
    return tiles > (may_be_two && tile.block_n == kTwins.block_n ? 256 : 128);
}

}  // namespace fa101::sm90
