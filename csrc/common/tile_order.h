// The order in which tiles of queries are worked through.
#pragma once

#include <fa101/params.h>

#include <algorithm>
#include <cstdint>

namespace fa101 {

// With a causal mask tiles differ in length, and the longest should start first: a long one that
// starts last keeps the device waiting. Over all heads at once K and V would leave L2 between two
// tiles of a head, so it is done section by section, of as many heads as L2 holds. Equal tiles go
// head by head: sections of one.
inline int section_heads(const Problem& p) {
    if (!p.has_right_bound()) return 1;
    constexpr int64_t kL2Budget = 32 << 20;
    const int64_t bytes_per_head =
        p.seqlen_k * (p.head_dim + p.head_dim_v) * size_of(p.dtype_kv) / p.group_size();
    return static_cast<int>(std::clamp<int64_t>(kL2Budget / std::max<int64_t>(bytes_per_head, 1), 1,
                                                p.batch * p.num_heads));
}

}  // namespace fa101
