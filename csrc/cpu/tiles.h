// What the three rungs share: rows of the caller's tensors as float32 tiles and panels (simd.h),
// and the step they all consist of, a panel of queries meeting a tile of keys.
#pragma once

#include <fa101/params.h>
#include <fa101/plan.h>

#include "common/bias_mask.h"
#include "common/mask.h"
#include "cpu/simd.h"

#include <cstdint>
#include <vector>

namespace fa101 {

template <class Int>
constexpr Int round_up(Int value, Int multiple) {
    return ceil_div(value, multiple) * multiple;
}

// Row stride of a tile. The extra vector is for the L1 cache: rows a power of two apart would
// compete for a few of its sets.
constexpr int64_t tile_stride(int64_t cols) {
    return round_up<int64_t>(cols, kMaxVector) + kMaxVector;
}

// Floats of a panel of `lanes` queries with `cols` rows, whole register tiles.
constexpr int64_t panel_floats(int64_t lanes, int64_t cols) {
    return lanes * round_up<int64_t>(cols, kMaxRows);
}

// Hands out pieces of the workspace, 64-byte aligned like its start. Without one it only counts: a
// family's workspace size is the sum of its pieces, so the two cannot disagree.
class Arena {
  public:
    explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}

    float* floats(int64_t count) {
        const int64_t begin = round_up<int64_t>(bytes_, 64);
        bytes_ = begin + count * static_cast<int64_t>(sizeof(float));
        return base_ != nullptr ? reinterpret_cast<float*>(base_ + begin) : nullptr;
    }

    // `count` objects whose constructors take their pieces: T(arena, args...).
    template <class T, class... Args>
    std::vector<T> make(int64_t count, const Args&... args) {
        std::vector<T> objects;
        objects.reserve(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) objects.emplace_back(*this, args...);
        return objects;
    }

    int64_t bytes() const { return bytes_; }

  private:
    char* base_;
    int64_t bytes_ = 0;
};

// Queries [begin, begin + rows) of a head, one per lane; lanes [rows, width) are padding.
struct Panel {
    int64_t begin;
    int rows, width;
};

// Keys [begin, end); {0, 0} when there are none.
struct KeyRange {
    int64_t begin, end;
};

// Keys [begin, begin + n) of a head as float32, and room for their scores: what a GPU block keeps
// in shared memory.
struct KeyTile {
    KeyTile(Arena& arena, int64_t block_n, const Problem& problem);

    float* k;  // [block_n][tile_stride(head_dim)], whole register tiles
    float* v;  // [block_n][tile_stride(head_dim_v)]
    float* s;  // [block_n][width]
    int64_t begin = 0, n = 0;
};

// Room for one panel on its way between memory and registers, one per thread. With a bias or a mask
// the panel may be of these, for at most `block_n` keys.
struct Scratch {
    Scratch(Arena& arena, int64_t block_n, const Problem& problem);

    float* rows;         // [width][tile_stride(head_dim, head_dim_v or block_n)]
    float* row_scale;    // [width]
    float* alpha;        // [width]
    float* bias;         // [block_n][width], also for the mask
    int32_t* key_begin;  // [width]
    int32_t* key_end;    // [width]
};

// One query head of one batch entry, with its key/value head.
class Head {
  public:
    // index = batch * num_heads + head
    Head(const SimdKernels& simd, const Problem& problem, const Tensors& tensors, int64_t index);

    // The panel that starts at query `begin`, at most as wide as the registers and up to `end`.
    Panel panel(int64_t begin, int64_t end) const;

    // The keys that exist.
    int64_t num_keys() const { return mask_.seqlen_k; }

    // From the first key that some query of [m_begin, m_end) may see to the last: both bounds move
    // right with the query.
    KeyRange keys(int64_t m_begin, int64_t m_end) const {
        const KeyRange range{mask_.key_begin(m_begin), mask_.key_end(m_end - 1)};
        return range.begin < range.end ? range : KeyRange{0, 0};
    }
    KeyRange keys(const Panel& panel) const { return keys(panel.begin, panel.begin + panel.rows); }

    // Rows [begin, begin + n) of K and V.
    void load_keys(int64_t begin, int64_t n, KeyTile& tile) const;

    // Q^T of the panel, scaled so that Q K^T are base-2 logits, or natural ones before a softcap;
    // K's descale is in it.
    void load_q(const Panel& panel, const Scratch& scratch, float* q_panel) const;

    // The logits of the keys [begin, begin + n): softcap, bias and mask.
    void finish_scores(const Panel& panel, int64_t begin, int64_t n, const Scratch& scratch,
                       float* s_panel) const;

    // O^T = O^T * alpha + V^T P^T by `accumulate`, for the keys [begin, begin + n), whose rows of V
    // start at v. What a lane may not see has no effect, even if it is NaN.
    void add_values(SimdKernels::Accumulate accumulate, const Panel& panel, int64_t begin,
                    int64_t n, const float* v, const float* p_panel, const Scratch& scratch,
                    float* o_panel) const;

    // The panel meets a tile of keys: one step of the online softmax.
    void attend(const Panel& panel, const float* q_panel, const KeyTile& tile,
                const Scratch& scratch, float* row_max, float* row_sum, float* o_panel) const;

    // O = (O^T)^T / l, times V's descale, and lse, to the caller's tensors.
    void store_o(const Panel& panel, const float* o_panel, const float* row_max,
                 const float* row_sum, const Scratch& scratch) const;

  private:
    // Those of the keys [begin, begin + n) that every query of the panel sees; begin <= end.
    KeyRange seen_by_all(const Panel& panel, int64_t begin, int64_t n) const;
    // What each query sees of these keys.
    Visible visible(const Panel& panel, int64_t begin, int64_t n, const Scratch& scratch) const;
    // Bias or mask for these keys, times `scale`, in scratch.bias: `src` is the element of the
    // first query and key. Lanes that pad the panel get 0.
    void load_bias(DType dtype, const void* src, int64_t row_stride, int64_t key_stride,
                   const Panel& panel, int64_t n, float scale, const Scratch& scratch) const;

    const SimdKernels& simd_;
    const Problem& problem_;
    const Tensors& tensors_;
    const int64_t batch_;
    const Mask mask_;
    const BiasMask bias_mask_;
    const char* q_;
    const char* k_;  // of the head; see key_offset
    const char* v_;
    float k_descale_, v_descale_;
    char* o_;
    float* lse_;  // or null
};

}  // namespace fa101
