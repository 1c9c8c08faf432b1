// Tiles of floats in shared memory, as the float32 kernels share them: how they get there, and what
// a product of TF32 cannot have in them.
#pragma once

#include "common/memory.cuh"
#include "common/mma_tile.cuh"
#include "flash_attn_tf32/mma.cuh"

#include <cstdint>

namespace fa101::tf32 {

// The largest float that Split does not round to inf.
constexpr float kMaxSplit = 0x1.ffdffep127f;

// Copies rows [first_row, first_row + kRows) of kCols floats into shared rows kStride apart,
// kNThreads threads together; rows from num_rows and columns from num_cols on become zeros and are
// not read.
template <int kRows, int kCols, int kStride, int kNThreads>
__device__ __forceinline__ void copy_rows(int thread, float* dst, const float* src,
                                          int64_t row_stride, int first_row, int num_rows,
                                          int num_cols, bool aligned16) {
    // So many threads take neighbouring pieces of 16 bytes: a power of two that divides the row.
    constexpr int kPieces = kCols / 4, kPower = kPieces & -kPieces;
    constexpr int kRowThreads = kPower < kNThreads ? kPower : kNThreads;
    constexpr int kRowsAtOnce = kNThreads / kRowThreads;
    static_assert(kRows % kRowsAtOnce == 0, "every thread copies as much");
    asm volatile("" : "+l"(row_stride));  // its multiples are not kept in registers
    const int row_of_thread = thread / kRowThreads, col_of_thread = thread % kRowThreads * 4;
    dst += row_of_thread * kStride + col_of_thread;
    src += (first_row + row_of_thread) * row_stride + col_of_thread;
    num_rows -= first_row + row_of_thread;  // those that exist, from this thread's first on
    num_cols -= col_of_thread;
    if (aligned16) {
#pragma unroll 8
        for (int row = 0; row < kRows; row += kRowsAtOnce) {
#pragma unroll
            for (int col = 0; col < kCols; col += 4 * kRowThreads) {
                cp_async<16>(dst + row * kStride + col, src + col,
                             row < num_rows && col < num_cols);
            }
            src += kRowsAtOnce * row_stride;
        }
    } else {
#pragma unroll 1
        for (int row = 0; row < kRows; row += kRowsAtOnce) {
#pragma unroll 1
            for (int col = 0; col < kCols; col += 4 * kRowThreads) {
#pragma unroll
                for (int i = col; i < col + 4; ++i) {
                    cp_async<4>(dst + row * kStride + i, src + i, row < num_rows && i < num_cols);
                }
            }
            src += kRowsAtOnce * row_stride;
        }
    }
}

// Where three products gave NaN, what one gives: logits s of the warp's rows q and the keys k. One
// copy of the code for all elements: what counts for a path that hardly ever runs is to be small.
template <int kStride, int kM, int kN>
__device__ __forceinline__ void replace_nans(mma::Tile<kM, kN>& s, const float* q, const float* k,
                                             int head_dim, int lane) {
    bool has_nan = false;
    mma::for_each(s, [&](float& x, int, int, int) { has_nan |= x != x; });
    if (!__any_sync(~0u, has_nan)) return;
#pragma unroll 1
    for (int e = 0; e < 4 * kM * kN; ++e) {
        const int m = e / (4 * kN), n = e / 4 % kN, i = e % 4;
        const float* const row = q + (lane / 4 + mma::row_of(m, i)) * kStride;
        const float* const key = k + (lane % 4 * 2 + mma::col_of(n, i)) * kStride;
        float sum = 0.0f;
#pragma unroll 1
        for (int d = 0; d < head_dim; ++d) sum += row[d] * key[d];
        mma::for_each(s, [&](float& x, int mx, int nx, int ix) {
            if (mx == m && nx == n && ix == i && x != x) x = sum;
        });
    }
}

// Makes a tile of V one that Split can take; kNThreads threads together. What is not finite becomes
// 0: mma::add_nonfinite has given it to the rows that see it.
template <int kNThreads>
__device__ __forceinline__ void make_splittable(float* tile, int size, int thread) {
    for (int i = thread; i < size; i += kNThreads) {
        tile[i] = mma::is_finite(tile[i]) ? fminf(fmaxf(tile[i], -kMaxSplit), kMaxSplit) : 0.0f;
    }
}

}  // namespace fa101::tf32
