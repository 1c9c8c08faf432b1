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

inline bool has_few_rows(const Problem& p) { return p.seqlen_q * p.group_size() <= 16; }

// Fewest keys of a split. A row's part of O is 8 bytes a column, written and read; K and V are 4
// bytes a column and key in 16 bits. That is 6 % for 4 rows and 128 keys, 25 % for 32 and 256,
// served by L2 in part.
inline int min_keys(const Problem& p) { return has_few_rows(p) ? 128 : 256; }

// Rows of the result, as lse counts them.
inline int64_t result_rows(const Problem& p) { return p.batch * p.num_heads * p.seqlen_q; }

// Where blocks run.
struct Slots {
    int64_t num_sms, per_sm;
    static Slots of(const DeviceInfo& device, int per_sm) {
        return {std::max(device.num_sms, 1), per_sm};
    }
};

// The number of splits with which a typical tile of rows is done first, by a model of a GPU that
// memory keeps waiting. A multiprocessor reads as fast for one block as for all it can hold, but
// for a percent, or, with so many rows that they keep it waiting too, half as much again; the start
// of a block takes 1.5 us, in which an H200's would read some 64 keys of head_dim 128, a merge
// twice that, and a part of O as many as there are bytes in it.
inline int splits_per_wave(const Problem& p, int64_t blocks_per_split, const Slots& slots) {
    constexpr double kStart = 64, kMerge = 120;
    const double alone = has_few_rows(p) ? 1.01 : 1.5;
    const int64_t typical = typical_seqlen_k(p);
    const int64_t most =
        std::max(slots.per_sm * slots.num_sms / std::max<int64_t>(blocks_per_split, 1),
                 typical / min_keys(p));
    const double part = 2.0 * static_cast<double>(result_rows(p)) /
                        static_cast<double>(std::max<int64_t>(blocks_per_split, 1));  // in keys
    int64_t best = 1;
    double least = std::numeric_limits<double>::infinity();
    for (int64_t splits = 1; splits <= most; ++splits) {
        const int64_t load = ceil_div(blocks_per_split * splits, slots.num_sms);
        const double keys = static_cast<double>(load) *
                            (static_cast<double>(typical) / static_cast<double>(splits) +
                             (splits > 1 ? part : 0.0));
        const double cost = keys * (load < slots.per_sm ? alone : 1.0) +
                            kStart * static_cast<double>(ceil_div(load, slots.per_sm)) +
                            (splits > 1 ? kMerge : 0.0);
        if (cost < least) best = splits, least = cost;
    }
    return static_cast<int>(best);
}

// Where a tile's keys are split, in steps of its kernel. In a batch, where some sequences may be
// short and leave their slots idle, a long one is more waves; else it is one.
inline KeySplits key_splits(const Problem& p, const Splits& chosen, int step) {
    KeySplits splits;
    splits.per_wave = chosen.per_wave;
    splits.one_each = chosen.one_each;
    if (p.num_splits > 0) return splits;
    splits.min_steps = Divider::by(min_keys(p) / step);
    if (p.batch > 1) {
        const int64_t most =
            std::max<int64_t>(ceil_div<int64_t>(typical_seqlen_k(p), chosen.per_wave),
                              chosen.per_wave == 1 ? 8192 : 2048);
        splits.wave_steps = static_cast<int>(chosen.per_wave * most / step);
    }
    return splits;
}

// With a number of splits that the caller gives: so many, if there are as many steps. Else splits
// of 128 keys are for multiprocessors that have no block: two of 128 take longer than one of 256.
inline Splits choose_splits(const Problem& p, int64_t blocks_per_split, const Slots& slots,
                            int step) {
    constexpr int64_t kMax = std::numeric_limits<int>::max();
    const bool is_given = p.num_splits > 0;
    Splits splits;
    splits.per_wave = is_given ? static_cast<int>(std::min(p.num_splits, kMax))
                               : splits_per_wave(p, blocks_per_split, slots);
    splits.one_each = splits.per_wave;
    if (!is_given && has_few_rows(p)) {
        const int64_t one_each = slots.num_sms / std::max<int64_t>(blocks_per_split, 1);
        splits.one_each = static_cast<int>(clamp_to<int64_t>(one_each, 1, splits.per_wave));
    }
    const KeyRange all = {0, static_cast<int>(p.seqlen_k)};
    splits.count = key_splits(p, splits, step).count(all, step);
    return splits;
}

// The splits of a kernel that has enough to do without: none from two waves of blocks on, where the
// parts would be many and would gain little.
inline Splits splits_if_idle(const Problem& p, int64_t blocks, const Slots& slots, int step) {
    if (blocks >= 2 * slots.per_sm * slots.num_sms && p.num_splits == 0) return {};
    return choose_splits(p, blocks, slots, step);
}

// "" or why the grid of the parts, or that of their merge, is too large.
inline std::string refuse_grid(const Problem& p, int64_t blocks) {
    constexpr int64_t kMaxGrid = std::numeric_limits<int>::max();
    const int64_t merges = result_rows(p) * ceil_div<int64_t>(p.head_dim_v, kMergeCols);
    const int64_t rows = p.seqlen_q * p.group_size();
    if (rows >= kMaxGrid / 2) {
        return "it counts the queries of a group in 32 bits; there are " + std::to_string(rows);
    }
    if (blocks <= kMaxGrid && merges <= kMaxGrid) return "";
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

// Rows of a block that merges: one a warp. More parts than a warp absorbs at once are done sooner
// by the whole block, but those blocks must find room beside the ones that read keys, so only where
// rows are few. Fewer parts are the same sum either way, so the cache's capacity changes no bit.
inline int rows_per_merge(const Plan& plan, const Problem& p) {
    constexpr int64_t kFewRows = 64;
    const bool shares = plan.num_splits > merge_batch(plan.tile.head_dim);
    return shares && result_rows(p) <= kFewRows ? 1 : plan.tile.num_warps;
}

// `step`: of the plan's tile, in keys.
inline Partials make_partials(const Plan& plan, const Problem& p, int step, void* workspace) {
    Partials partials;
    partials.num_splits = plan.num_splits;
    partials.o_stride = o_stride(p);
    if (plan.num_splits > 1) {
        const Splits chosen = {plan.num_splits, plan.splits_per_wave, plan.splits_one_each};
        partials.keys = key_splits(p, chosen, step);
        partials.lse = static_cast<float*>(workspace);
        partials.o = partials.lse + lse_floats(plan, p);
    }
    return partials;
}

}  // namespace fa101::flash_decode
