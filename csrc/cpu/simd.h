// The vector code under the CPU ladder: one table of functions for each SIMD level.
//
// All three rungs are written against this table, so they differ in nothing but the order of their
// loops and the place of S and O: the memory traffic, which is what the ladder is about. What a GPU
// calls a warp is here a vector register: each lane is one query, and a softmax over keys runs down
// the lanes without ever crossing them. What it calls shared memory is L1 and L2: float32 tiles
// that are small enough to stay there.
//
//     panel  [n][width]  a matrix whose columns are `width` queries: Q^T, S^T and O^T of a few
//                        registers' width, rows contiguous and 64-byte aligned
//     tile   [n][ld]     rows of K or V (or Q, or O) as float32, one key (or query) a row
//
// This header stays free of inline functions: see simd_kernels.cpp.
#pragma once

#include <fa101/tensor_view.h>

#include <cstdint>

namespace fa101 {

enum class SimdLevel : uint8_t;

// The most any level has of the first three members below.
constexpr int kMaxVector = 16, kMaxPanel = 32, kMaxRows = 8;

// Which keys each lane of a panel sees: key j where begin[lane] <= j < end[lane] and, with a mask
// [n][width], mask[j * width + lane] != 0.
struct Visible {
    const int32_t *begin, *end;
    const float* mask;  // or null
};

struct SimdKernels {
    int vector;  // float32 lanes of a register; panel widths are multiples of it
    int panel;   // the widest panel: what the register tile holds
    int rows;    // rows of the register tile; scores() and accumulate() round up to it

    // dst[i][c] = float(src[i][c]) * row_scale[i] (null: 1), zeros up to a whole vector. Elements
    // of a row are col_stride apart; kBool becomes 0 and another number.
    void (*load_rows)(DType dtype, const void* src, int64_t src_stride, int64_t col_stride,
                      int64_t rows, int64_t cols, const float* row_scale, float* dst,
                      int64_t dst_stride);

    // dst[i][c] = DType(src[i][c] * row_scale[i]), rounded to nearest even; to 16 bits or more.
    void (*store_rows)(DType dtype, const float* src, int64_t src_stride, int64_t rows,
                       int64_t cols, const float* row_scale, void* dst, int64_t dst_stride);

    // dst[c][i] = src[i][c]
    void (*transpose)(const float* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst,
                      int64_t dst_stride);

    // S^T = K Q^T for n keys, by register tiles (which touch K and S^T up to a multiple of `rows`;
    // what is there does not matter) or one key at a time.
    using Scores = void (*)(const float* k, int64_t ld, int64_t n, int64_t head_dim,
                            const float* q_panel, int width, float* s_panel);
    Scores scores, scores_untiled;

    // What may happen to S^T before the softmax: s = softcap * log2(e) * tanh(s / softcap), which
    // takes natural logits to base 2; s += log2(e) * bias, a panel like S^T; and -inf for what is
    // not seen.
    void (*apply_softcap)(float* s_panel, int64_t n, int width, float softcap);
    void (*add_bias)(float* s_panel, int64_t n, int width, const float* bias);
    void (*hide)(float* s_panel, int64_t n, int width, const Visible& visible);

    // One step of the online softmax (common/online_softmax.h) on base-2 logits: replaces S^T by
    // P^T = 2^(S^T - m), updates m and l, and gives alpha, by which what came before shrinks.
    void (*softmax)(float* s_panel, int64_t n, int width, float* row_max, float* row_sum,
                    float* alpha);

    // O^T = O^T * alpha + V^T P^T for n keys, by register tiles (which touch V and O^T up to a
    // multiple of `rows` channels) or one channel at a time.
    using Accumulate = void (*)(const float* v, int64_t ld, int64_t n, int64_t head_dim_v,
                                const float* p_panel, int width, const float* alpha,
                                float* o_panel);
    Accumulate accumulate, accumulate_untiled;

    // The same where V is not finite: 0 * NaN would reach queries that do not see the key, so
    // each lane adds what it sees only. Slow, and rare.
    void (*accumulate_visible)(const float* v, int64_t ld, int64_t n, int64_t head_dim_v,
                               const float* p_panel, int width, const Visible& visible,
                               const float* alpha, float* o_panel);

    bool (*all_finite)(const float* src, int64_t ld, int64_t rows, int64_t cols);
};

// The table of a level that was built and that this CPU has.
const SimdKernels& simd_kernels(SimdLevel level);

extern const SimdKernels kSimdPortable;
extern const SimdKernels kSimdAvx2;
extern const SimdKernels kSimdAvx512;

}  // namespace fa101
