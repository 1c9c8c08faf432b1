// The order in which tiles of queries are worked through.
#pragma once

#include <fa101/params.h>

#include <algorithm>
#include <cstdint>

namespace fa101 {

// With a causal mask tiles differ in length, and the longest should start first: a long one that
// starts last keeps the device waiting. Over all heads at once K and V would leave L2 between two
// tiles of a head, so it is done section by section, of as many heads as `bytes` of L2 hold. Equal
// tiles go head by head: sections of one.
inline int section_heads(const Problem& p, int64_t bytes = 32 << 20) {
    if (!p.has_right_bound()) return 1;
    const int64_t bytes_per_head =
        p.seqlen_k * (p.head_dim + p.head_dim_v) * size_of(p.dtype_kv) / p.group_size();
    return static_cast<int>(std::clamp<int64_t>(bytes / std::max<int64_t>(bytes_per_head, 1), 1,
                                                p.batch * p.num_heads));
}

// A section begins with its longest tiles, which ask memory for all of its K and V at once; then
// memory rests. Where rows are short that is most of the time, so sections are small, but for the
// last, which shall end with many short tiles. Where they are long, all are as large as L2 allows.
struct Sections {
    int heads, last_heads;
};
inline Sections choose_sections(const Problem& p) {
    const int few = section_heads(p, 4 << 20);
    if (few < 2) return {section_heads(p), section_heads(p)};
    return {few, section_heads(p)};
}

}  // namespace fa101
