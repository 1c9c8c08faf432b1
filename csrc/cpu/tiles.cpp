#include "cpu/tiles.h"

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

Scratch::Scratch(Arena& arena, const Problem& problem)
    : rows(arena.floats(kMaxPanel * tile_stride(std::max(problem.head_dim, problem.head_dim_v)))),
      row_scale(arena.floats(kMaxPanel)),
      alpha(arena.floats(kMaxPanel)),
      visible(reinterpret_cast<int32_t*>(arena.floats(kMaxPanel))) {}

Head::Head(const SimdKernels& simd, const Problem& problem, const Tensors& t, int64_t index)
    : simd_(simd), problem_(problem), tensors_(t), mask_(mask_of(problem, t, index / problem.num_heads)) {
    const int64_t batch = index / problem.num_heads, head = index % problem.num_heads;
    const int64_t head_kv = head / problem.group_size();
    q_ = at(t.q_ptr, batch * t.q_batch_stride + head * t.q_head_stride, problem.dtype_q);
    k_ = at(t.k_ptr, batch * t.k_batch_stride + head_kv * t.k_head_stride, problem.dtype_kv);
    v_ = at(t.v_ptr, batch * t.v_batch_stride + head_kv * t.v_head_stride, problem.dtype_kv);
    o_ = static_cast<char*>(t.o_ptr) +
         (batch * t.o_batch_stride + head * t.o_head_stride) * size_of(problem.dtype_o);
    lse_ = t.lse_ptr != nullptr ? t.lse_ptr + index * problem.seqlen_q : nullptr;
}

Panel Head::panel(int64_t begin, int64_t end) const {
    const int rows = static_cast<int>(std::min<int64_t>(end - begin, simd_.panel));
    return {begin, rows, round_up(rows, simd_.vector)};
}

void Head::load_keys(int64_t begin, int64_t n, KeyTile& tile) const {
    const DType dtype = problem_.dtype_kv;
    simd_.load_rows(dtype, at(k_, begin * tensors_.k_row_stride, dtype), tensors_.k_row_stride, n,
                    problem_.head_dim, nullptr, tile.k, tile_stride(problem_.head_dim));
    simd_.load_rows(dtype, at(v_, begin * tensors_.v_row_stride, dtype), tensors_.v_row_stride, n,
                    problem_.head_dim_v, nullptr, tile.v, tile_stride(problem_.head_dim_v));
    tile.begin = begin;
    tile.n = n;
}

void Head::load_q(const Panel& panel, const Scratch& scratch, float* q_panel) const {
    float* rows = scratch.rows;
    const int64_t ld = tile_stride(problem_.head_dim);
    std::fill_n(scratch.row_scale, panel.rows, problem_.softmax_scale * kLog2e);
    simd_.load_rows(problem_.dtype_q, at(q_, panel.begin * tensors_.q_row_stride, problem_.dtype_q),
                    tensors_.q_row_stride, panel.rows, problem_.head_dim, scratch.row_scale, rows,
                    ld);
    std::fill(rows + panel.rows * ld, rows + panel.width * ld, 0.0f);
    simd_.transpose(rows, ld, panel.width, problem_.head_dim, q_panel, panel.width);
}

const int32_t* Head::visible(const Panel& panel, int64_t begin, int64_t n, int32_t* buffer) const {
    if (mask_.key_end(panel.begin) >= begin + n) return nullptr;
    for (int lane = 0; lane < panel.width; ++lane) {
        buffer[lane] = static_cast<int32_t>(mask_.key_end(panel.begin + lane) - begin);
    }
    return buffer;
}

void Head::add_values(SimdKernels::Accumulate accumulate, const Panel& panel, const float* v,
                      int64_t n, const float* p_panel, const int32_t* visible, const float* alpha,
                      float* o_panel) const {
    const int64_t head_dim_v = problem_.head_dim_v, ld = tile_stride(head_dim_v);
    if (visible == nullptr || simd_.all_finite(v, ld, n, head_dim_v)) {
        accumulate(v, ld, n, head_dim_v, p_panel, panel.width, alpha, o_panel);
    } else {
        simd_.accumulate_visible(v, ld, n, head_dim_v, p_panel, panel.width, visible, alpha,
                                 o_panel);
    }
}

void Head::attend(const Panel& panel, const float* q_panel, const KeyTile& tile,
                  const Scratch& scratch, float* row_max, float* row_sum, float* o_panel) const {
    const int64_t n = std::min(tile.n, key_end(panel) - tile.begin);
    if (n <= 0) return;
    const int32_t* seen = visible(panel, tile.begin, n, scratch.visible);
    simd_.scores(tile.k, tile_stride(problem_.head_dim), n, problem_.head_dim, q_panel, panel.width,
                 tile.s);
    simd_.softmax(tile.s, n, panel.width, seen, row_max, row_sum, scratch.alpha);
    add_values(simd_.accumulate, panel, tile.v, n, tile.s, seen, scratch.alpha, o_panel);
}

void Head::store_o(const Panel& panel, const float* o_panel, const float* row_max,
                   const float* row_sum, const Scratch& scratch) const {
    const int64_t ld = tile_stride(problem_.head_dim_v);
    simd_.transpose(o_panel, panel.width, problem_.head_dim_v, panel.rows, scratch.rows, ld);
    for (int i = 0; i < panel.rows; ++i) {
        scratch.row_scale[i] = inverse_row_sum(row_sum[i]);
        if (lse_ != nullptr) lse_[panel.begin + i] = log_sum_exp(row_max[i], row_sum[i]);
    }
    simd_.store_rows(problem_.dtype_o, scratch.rows, ld, panel.rows, problem_.head_dim_v,
                     scratch.row_scale,
                     o_ + panel.begin * tensors_.o_row_stride * size_of(problem_.dtype_o),
                     tensors_.o_row_stride);
}

}  // namespace fa101
