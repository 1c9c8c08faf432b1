// Which of the compiled kernels answers a problem. Changes speed, never results. Plain C++: the
// planner and the launcher both read it. The measurements behind it are in kernel.cuh.
#pragma once

#include <fa101/params.h>
#include <fa101/plan.h>

#include "common/mask.h"

#include <cstdint>

namespace fa101::sm90 {

// head_dim of the compiled tiles; TMA pads smaller ones with zeros.
constexpr int kHeadDims[] = {64, 128, 256};

// Consumer warpgroups of 64 query rows. Three hide more of each other's waiting than two, as long
// as the registers last: 160 a thread instead of 240, so at 256, where O takes 128, there are two.
constexpr int max_groups(int head_dim) { return head_dim <= 128 ? 3 : 2; }

// Keys of one step. 128 columns of S take 64 registers, as much as O at head_dim 128: three groups
// hold both only with 80. At 256 it is shared memory that ends at 80.
constexpr int block_n(int head_dim, int groups) {
    return head_dim == 64 || (head_dim == 128 && groups == 2) ? 128 : 80;
}

// The groups take turns to issue their products. Gains 2 % at 256 and loses elsewhere.
constexpr bool takes_turns(int head_dim) { return head_dim == 256; }

constexpr int kStages = 2;  // K and V blocks in shared memory, each

inline int groups_for(const Problem& p, int num_sms, int head_dim) {
    // Rows that tiles of so many groups compute, the empty ones of the last tile among them.
    const auto rows = [&p](int64_t groups) {
        return groups * 64 * ceil_div<int64_t>(p.seqlen_q, groups * 64);
    };
    if (p.has_left_bound()) return 2;  // a window's bounds take the registers that three lack
    // Each SM has one tile at most: the shorter ends earlier.
    if (p.batch * p.num_heads * rows(2) <= int64_t{128} * num_sms) return 2;
    bool three = false;
    if (head_dim == 64) {
        three = 4 * rows(3) <= 5 * rows(2) && (!p.has_right_bound() || p.seqlen_q > 1024);
    } else if (head_dim == 128) {
        three = p.seqlen_q > (p.has_right_bound() ? 4096 : 2048);
    }
    return three ? 3 : 2;
}

// Blocks fetch the number of their next tile from a counter in the workspace. A few tiles of the
// same length are as well dealt out in advance, which saves clearing the counter (1.8 us).
inline bool has_counter(const Tile& tile, const Problem& p) {
    const int64_t tiles = p.batch * p.num_heads * ceil_div<int64_t>(p.seqlen_q, tile.block_m);
    return tiles > (p.has_right_bound() ? 64 : 512);
}

}  // namespace fa101::sm90
