// What writes the columns of a new row: for append()'s kernel, and for the one that appends and
// attends (flash_decode/kernel.cuh).
#pragma once

#include "common/memory.cuh"
#include "kv_cache.h"

#include <cstdint>

namespace fa101 {

template <class T>
__device__ __forceinline__ void put_column(const RowJob& job, int64_t col, float x) {
    if (job.is_quantised) {
        static_cast<uint8_t*>(job.copy->dst_ptr)[job.dst + col] = float_to_e4m3(x / job.descale);
    } else {
        static_cast<T*>(job.copy->dst_ptr)[job.dst + col] = from_float<T>(x);
    }
}

// By a warp: the columns from first_col on, which are not rotated.
template <class T>
__device__ __forceinline__ void copy_columns(const AppendParams& p, const RowJob& job,
                                             int64_t first_col, int lane) {
    constexpr int kVector = 16 / sizeof(T);
    const T* const src = static_cast<const T*>(job.copy->src_ptr) + job.src;
    T* const dst = static_cast<T*>(job.copy->dst_ptr) + job.dst;
    const int64_t head_dim = job.copy->head_dim;
    if (job.is_quantised) {
        for (int64_t col = first_col + lane; col < head_dim; col += 32) {
            put_column<T>(job, col, to_float(src[col]));
        }
    } else if (first_col == 0 && p.aligned16) {
        for (int64_t col = kVector * lane; col < head_dim; col += kVector * 32) {
            *reinterpret_cast<uint4*>(dst + col) = *reinterpret_cast<const uint4*>(src + col);
        }
    } else {
        for (int64_t col = first_col + lane; col < head_dim; col += 32) dst[col] = src[col];
    }
}

}  // namespace fa101
