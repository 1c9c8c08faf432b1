#include "cpu/tiles.h"

#include "common/float8.h"
#include "common/key_rows.h"
#include "common/online_softmax.h"

#include <algorithm>

namespace fa101 {
namespace {

// The address of an element. Without keys, k and v may be null, which stays null.
const char* at(const void* base, int64_t element, DType dtype) {
    return base == nullptr ? nullptr : static_cast<const char*>(base) + element * size_of(dtype);
}

}  // namespace

KeyTile::KeyTile(Arena& arena, int64_t block_n, const Problem& problem)
    : k(arena.floats(round_up<int64_t>(block_n, kMaxRows) * tile_stride(problem.head_dim))),
      v(arena.floats(block_n * tile_stride(problem.head_dim_v))),
      s(arena.floats(panel_floats(kMaxPanel, block_n))) {}

Scratch::Scratch(Arena& arena, int64_t block_n, const Problem& problem) {
    const int64_t keys = problem.has_bias || problem.has_mask ? block_n : 0;
    rows = arena.floats(kMaxPanel *
                        tile_stride(std::max({problem.head_dim, problem.head_dim_v, keys})));
    row_scale = arena.floats(kMaxPanel);
    alpha = arena.floats(kMaxPanel);
    bias = arena.floats(panel_floats(kMaxPanel, keys));
    key_begin = reinterpret_cast<int32_t*>(arena.floats(kMaxPanel));
    key_end = reinterpret_cast<int32_t*>(arena.floats(kMaxPanel));
}

Head::Head(const SimdKernels& simd, const Problem& problem, const Tensors& t, int64_t index)
    : simd_(simd),
      problem_(problem),
      tensors_(t),
      batch_(index / problem.num_heads),
      mask_(mask_of(problem, t, index / problem.num_heads)),
      bias_mask_(problem, t, index / problem.num_heads, index % problem.num_heads) {
    const int64_t batch = index / problem.num_heads, head = index % problem.num_heads;
    const int64_t head_kv = head / problem.group_size();
    q_ = at(t.q_ptr, batch * t.q_batch_stride + head * t.q_head_stride, problem.dtype_q);
    k_ = at(t.k_ptr, head_kv * t.k_head_stride, problem.dtype_kv);
    v_ = at(t.v_ptr, head_kv * t.v_head_stride, problem.dtype_kv);
    k_descale_ = descale_of(t.k_descale, batch, head_kv);
    v_descale_ = descale_of(t.v_descale, batch, head_kv);
    o_ = static_cast<char*>(t.o_ptr) +
         (batch * t.o_batch_stride + head * t.o_head_stride) * size_of(problem.dtype_o);
    lse_ = t.lse_ptr != nullptr ? t.lse_ptr + index * problem.seqlen_q : nullptr;
}

Panel Head::panel(int64_t begin, int64_t end) const {
    const int rows = static_cast<int>(std::min<int64_t>(end - begin, simd_.panel));
    return {begin, rows, round_up(rows, simd_.vector)};
}

void Head::load_keys(int64_t begin, int64_t n, KeyTile& tile) const {
    const auto load = [&](const char* head, int64_t batch_stride, int64_t row_stride, int64_t cols,
                          float* dst) {
        const int64_t page_size = problem_.page_size > 0 ? problem_.page_size : problem_.seqlen_k;
        for (int64_t key = begin, rows; key < begin + n; key += rows) {
            rows = std::min(begin + n - key, page_size - key % page_size);
            const int64_t first = key_offset(problem_, tensors_, batch_, static_cast<int>(key),
                                             batch_stride, row_stride);
            simd_.load_rows(problem_.dtype_kv, at(head, first, problem_.dtype_kv), row_stride, 1,
                            rows, cols, nullptr, dst, tile_stride(cols));
            dst += rows * tile_stride(cols);
        }
    };
    const Tensors& t = tensors_;
    load(k_, t.k_batch_stride, t.k_row_stride, problem_.head_dim, tile.k);
    load(v_, t.v_batch_stride, t.v_row_stride, problem_.head_dim_v, tile.v);
    tile.begin = begin;
    tile.n = n;
}

void Head::load_q(const Panel& panel, const Scratch& scratch, float* q_panel) const {
    float* rows = scratch.rows;
    const int64_t ld = tile_stride(problem_.head_dim);
    std::fill_n(scratch.row_scale, panel.rows,
                problem_.softmax_scale * k_descale_ * (problem_.softcap > 0 ? 1.0f : kLog2e));
    simd_.load_rows(problem_.dtype_q, at(q_, panel.begin * tensors_.q_row_stride, problem_.dtype_q),
                    tensors_.q_row_stride, 1, panel.rows, problem_.head_dim, scratch.row_scale,
                    rows, ld);
    std::fill(rows + panel.rows * ld, rows + panel.width * ld, 0.0f);
    simd_.transpose(rows, ld, panel.width, problem_.head_dim, q_panel, panel.width);
}

void Head::load_bias(DType dtype, const void* src, int64_t row_stride, int64_t key_stride,
                     const Panel& panel, int64_t n, float scale, const Scratch& scratch) const {
    const int64_t ld = tile_stride(n);
    std::fill_n(scratch.row_scale, panel.rows, scale);
    simd_.load_rows(dtype, src, row_stride, key_stride, panel.rows, n, scratch.row_scale,
                    scratch.rows, ld);
    std::fill(scratch.rows + panel.rows * ld, scratch.rows + panel.width * ld, 0.0f);
    simd_.transpose(scratch.rows, ld, panel.width, n, scratch.bias, panel.width);
}

KeyRange Head::seen_by_all(const Panel& panel, int64_t begin, int64_t n) const {
    if (problem_.has_mask) return {begin, begin};
    const int64_t last = panel.begin + panel.rows - 1, end = begin + n;
    const int64_t from = std::clamp<int64_t>(mask_.key_begin(last), begin, end);
    return {from, std::clamp<int64_t>(mask_.key_end(panel.begin), from, end)};
}

Visible Head::visible(const Panel& panel, int64_t begin, int64_t n, const Scratch& scratch) const {
    for (int lane = 0; lane < panel.width; ++lane) {
        scratch.key_begin[lane] = static_cast<int32_t>(mask_.key_begin(panel.begin + lane) - begin);
        scratch.key_end[lane] = static_cast<int32_t>(mask_.key_end(panel.begin + lane) - begin);
    }
    if (!problem_.has_mask) return {scratch.key_begin, scratch.key_end, nullptr};
    const BiasMask& m = bias_mask_;
    load_bias(DType::kBool, m.mask + panel.begin * m.mask_row_stride + begin * m.mask_key_stride,
              m.mask_row_stride, m.mask_key_stride, panel, n, 1.0f, scratch);
    return {scratch.key_begin, scratch.key_end, scratch.bias};
}

void Head::finish_scores(const Panel& panel, int64_t begin, int64_t n, const Scratch& scratch,
                         float* s_panel) const {
    if (problem_.softcap > 0) simd_.apply_softcap(s_panel, n, panel.width, problem_.softcap);
    if (problem_.has_bias) {
        load_bias(problem_.dtype_bias, bias_mask_.bias_at(panel.begin, begin),
                  bias_mask_.bias_row_stride, bias_mask_.bias_key_stride, panel, n, 1.0f, scratch);
        simd_.add_bias(s_panel, n, panel.width, scratch.bias);
    }
    const auto hide = [&](int64_t from, int64_t to) {
        if (from == to) return;
        simd_.hide(s_panel + (from - begin) * panel.width, to - from, panel.width,
                   visible(panel, from, to - from, scratch));
    };
    const KeyRange whole = seen_by_all(panel, begin, n);
    hide(begin, whole.begin);
    hide(whole.end, begin + n);
}

void Head::add_values(SimdKernels::Accumulate accumulate, const Panel& panel, int64_t begin,
                      int64_t n, const float* v, const float* p_panel, const Scratch& scratch,
                      float* o_panel) const {
    const int64_t head_dim_v = problem_.head_dim_v, ld = tile_stride(head_dim_v);
    const KeyRange whole = seen_by_all(panel, begin, n);
    if (simd_.all_finite(v, ld, whole.begin - begin, head_dim_v) &&
        simd_.all_finite(v + (whole.end - begin) * ld, ld, begin + n - whole.end, head_dim_v)) {
        accumulate(v, ld, n, head_dim_v, p_panel, panel.width, scratch.alpha, o_panel);
    } else {
        simd_.accumulate_visible(v, ld, n, head_dim_v, p_panel, panel.width,
                                 visible(panel, begin, n, scratch), scratch.alpha, o_panel);
    }
}

void Head::attend(const Panel& panel, const float* q_panel, const KeyTile& tile,
                  const Scratch& scratch, float* row_max, float* row_sum, float* o_panel) const {
    // The part of the tile that the panel sees, from a whole register tile on.
    const KeyRange seen = keys(panel);
    const int64_t first = std::max<int64_t>(seen.begin - tile.begin, 0) / kMaxRows * kMaxRows;
    const int64_t begin = tile.begin + first, n = std::min(tile.begin + tile.n, seen.end) - begin;
    if (n <= 0) return;
    const int64_t ld_k = tile_stride(problem_.head_dim), ld_v = tile_stride(problem_.head_dim_v);
    simd_.scores(tile.k + first * ld_k, ld_k, n, problem_.head_dim, q_panel, panel.width, tile.s);
    finish_scores(panel, begin, n, scratch, tile.s);
    simd_.softmax(tile.s, n, panel.width, row_max, row_sum, scratch.alpha);
    add_values(simd_.accumulate, panel, begin, n, tile.v + first * ld_v, tile.s, scratch, o_panel);
}

void Head::store_o(const Panel& panel, const float* o_panel, const float* row_max,
                   const float* row_sum, const Scratch& scratch) const {
    const int64_t ld = tile_stride(problem_.head_dim_v);
    simd_.transpose(o_panel, panel.width, problem_.head_dim_v, panel.rows, scratch.rows, ld);
    for (int i = 0; i < panel.rows; ++i) {
        // Who sees no key sees no descale.
        scratch.row_scale[i] = row_sum[i] == 0 ? 0.0f : inverse_row_sum(row_sum[i]) * v_descale_;
        if (lse_ != nullptr) lse_[panel.begin + i] = log_sum_exp(row_max[i], row_sum[i]);
    }
    simd_.store_rows(problem_.dtype_o, scratch.rows, ld, panel.rows, problem_.head_dim_v,
                     scratch.row_scale,
                     o_ + panel.begin * tensors_.o_row_stride * size_of(problem_.dtype_o),
                     tensors_.o_row_stride);
}

}  // namespace fa101
