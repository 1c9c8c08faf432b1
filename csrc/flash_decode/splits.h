// How the keys are split over blocks and where the parts of the result go: the host's side of it,
// shared by the families that split them.
#pragma once

#include <fa101/params.h>
#include <fa101/plan.h>

#include "common/mask.h"
#include "flash_decode/family.h"
#include "flash_decode/key_splits.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace fa101::flash_decode {

// Keys a kernel is tuned for. Few queries come with a long cache, of which seqlen_k may only be the
// capacity; many, with about as many keys.
inline int64_t typical_seqlen_k(const Problem& p) { return p.seqlen_q > 256 ? p.seqlen_q : 8192; }

// The queries of a key/value head's group fit the smallest tile.
inline bool is_decoding(const Problem& p) { return p.seqlen_q * p.group_size() <= 16; }

// Keys of the first splits: from nothing that a longer cache or other company would change. So it
// is the largest that, with as many keys as is typical, fills whole waves of the device's `slots`
// for blocks, or nearly; a kernel has its reason for the smallest.
//
// It is a power of two: then the splits of a smaller one are parts of those of a larger one, and
// their number tells where they are.
inline int64_t choose_chunk(int64_t blocks_per_split, int64_t slots, int64_t typical_seqlen_k,
                            int64_t smallest) {
    int64_t best = kMaxChunk;
    double best_fill = 0;
    for (int64_t chunk = kMaxChunk; chunk >= smallest && best_fill < 0.9; chunk /= 2) {
        const int64_t blocks = blocks_per_split * ceil_div(typical_seqlen_k, chunk);
        const int64_t waves = std::max<int64_t>(ceil_div(blocks, slots), 1);
        const double fill = static_cast<double>(blocks) / static_cast<double>(waves * slots);
        if (fill > best_fill) {
            best_fill = fill;
            best = chunk;
        }
    }
    return best;
}

// With a number of splits that the caller gives: the keys there may be in as many equal pieces,
// each of whole steps of every tile.
inline KeySplits forced_splits(const Problem& p) {
    const int64_t steps = ceil_div<int64_t>(ceil_div(p.seqlen_k, p.num_splits), kChunkStep);
    return {static_cast<int>(std::max<int64_t>(steps, 1) * kChunkStep)};
}

// `chunk` is the family's choice.
inline int splits_of(const Problem& p, int64_t chunk) {
    if (p.num_splits > 0) return forced_splits(p).count(p.seqlen_k);
    return KeySplits::growing(static_cast<int>(chunk), is_decoding(p)).count(p.seqlen_k);
}

// The splits of a kernel that has enough to do without: none from two waves of blocks on, where the
// parts would be many and would gain little.
inline int splits_if_idle(const Problem& p, int64_t blocks, int64_t slots, int64_t smallest) {
    if (blocks >= 2 * slots && p.num_splits == 0) return 1;
    return splits_of(p, choose_chunk(blocks, slots, typical_seqlen_k(p), smallest));
}

inline KeySplits key_splits(const Plan& plan, const Problem& p) {
    if (plan.num_splits == 1) return {static_cast<int>(p.seqlen_k)};
    if (p.num_splits > 0) return forced_splits(p);
    int chunk = kChunkStep;
    while (splits_of(p, chunk) > plan.num_splits) chunk *= 2;
    return KeySplits::growing(chunk, is_decoding(p));
}

// Rows of the result, as lse counts them.
inline int64_t result_rows(const Problem& p) { return p.batch * p.num_heads * p.seqlen_q; }

// "" or why the grid of the parts, or that of their merge, is too large.
inline std::string refuse_grid(const Problem& p, int64_t blocks) {
    constexpr int64_t kMaxGrid = std::numeric_limits<int>::max();
    const int64_t merges = result_rows(p) * ceil_div<int64_t>(p.head_dim_v, kMergeCols);
    if (blocks <= kMaxGrid && merges <= kMaxGrid && p.seqlen_q * p.group_size() < kMaxGrid / 2) {
        return "";
    }
    return "its grids would have " + std::to_string(blocks) + " blocks for the keys and " +
           std::to_string(merges) + " rows to merge; 2^31 - 1 is the limit";
}

// The workspace: lse of all parts, then their O. Multiples of four floats, so that rows of O start
// on 16-byte boundaries.
inline int64_t lse_floats(const Plan& plan, const Problem& p) {
    return ceil_div<int64_t>(result_rows(p) * plan.num_splits, 4) * 4;
}
inline int64_t o_stride(const Problem& p) { return ceil_div<int64_t>(p.head_dim_v, 4) * 4; }

inline int64_t partials_bytes(const Plan& plan, const Problem& p) {
    if (plan.num_splits == 1) return 0;
    const int64_t o_floats = result_rows(p) * plan.num_splits * o_stride(p);
    return static_cast<int64_t>(sizeof(float)) * (lse_floats(plan, p) + o_floats);
}

// After them, where the kernel merges them itself: one flag a part (merge.cuh).
inline int64_t flags_bytes(const Plan& plan, const Problem& p) {
    if (plan.num_splits == 1) return 0;
    return static_cast<int64_t>(sizeof(uint64_t)) * result_rows(p) * plan.num_splits;
}

// Rows of a block that merges. One row is done sooner by a whole block, but those blocks must find
// room beside the ones that read keys, so only where rows are few; else each warp has its own.
inline int rows_per_merge(const Plan& plan, const Problem& p) {
    constexpr int64_t kFewRows = 8;
    return result_rows(p) <= kFewRows ? 1 : plan.tile.num_warps;
}

inline Partials make_partials(const Plan& plan, const Problem& p, void* workspace) {
    Partials partials;
    partials.num_splits = plan.num_splits;
    partials.keys = key_splits(plan, p);
    partials.o_stride = o_stride(p);
    if (plan.num_splits > 1) {
        partials.lse = static_cast<float*>(workspace);
        partials.o = partials.lse + lse_floats(plan, p);
    }
    return partials;
}

}  // namespace fa101::flash_decode
