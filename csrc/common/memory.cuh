// Between global memory (any of the three dtypes, any alignment) and float32 in shared memory and
// registers, four elements at a time.
#pragma once

#include <fa101/params.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fa101 {

// A float4 that loops can index; one 128-bit instruction loads or stores it.
struct alignas(16) Float4 {
    float x[4];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// One element of a dtype known at run time.
__device__ __forceinline__ float to_float(const void* element, DType dtype) {
    if (dtype == DType::kFloat32) return *static_cast<const float*>(element);
    if (dtype == DType::kFloat16) return to_float(*static_cast<const __half*>(element));
    return to_float(*static_cast<const __nv_bfloat16*>(element));
}

template <class T>
__device__ __forceinline__ T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else if constexpr (std::is_same_v<T, __half>) {
        return __float2half_rn(x);
    } else {
        return __float2bfloat16_rn(x);
    }
}

template <class T>
struct alignas(4 * sizeof(T)) Vector4 {
    T x[4];
};

// Four consecutive elements; zeros past `count`, which are not read. `vectors` is
// Problem::aligned16: rows start aligned and hold whole vectors, so count is never 1, 2 or 3.
template <class T>
__device__ __forceinline__ Float4 load4(const T* src, int count, bool vectors) {
    Float4 result = {};
    if (vectors) {
        if (count > 0) {
            const auto vector = *reinterpret_cast<const Vector4<T>*>(src);
#pragma unroll
            for (int i = 0; i < 4; ++i) result.x[i] = to_float(vector.x[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) result.x[i] = to_float(src[i]);
        }
    }
    return result;
}

template <class T>
__device__ __forceinline__ void store4(T* dst, const Float4& value, int count, bool vectors) {
    if (vectors) {
        if (count > 0) {
            Vector4<T> vector;
#pragma unroll
            for (int i = 0; i < 4; ++i) vector.x[i] = from_float<T>(value.x[i]);
            *reinterpret_cast<Vector4<T>*>(dst) = vector;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) dst[i] = from_float<T>(value.x[i]);
        }
    }
}

// Asks for the sector of `address`, for this multiprocessor or for all; nothing waits for it.
__device__ __forceinline__ void prefetch_l1(const void* address) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// cp.async (sm_80) copies without a register in between, so the copy goes on while the thread
// computes; zeros where not `valid`. It cannot convert, hence float32 only. 16 bytes go past L1.
template <int kBytes>
__device__ __forceinline__ void cp_async(float* dst, const float* src, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(dst));
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(src),
                     "r"(valid ? 16 : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(src),
                     "n"(kBytes), "r"(valid ? kBytes : 0)
                     : "memory");
    }
#endif
}

// This thread's copies have landed. Others see them after a barrier.
__device__ __forceinline__ void cp_async_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Or in groups: what was started since the last call is one, and all but the newest kPending of
// this thread's groups have landed.
__device__ __forceinline__ void cp_async_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// load4 into shared memory; asynchronous where the hardware can, until cp_async_wait().
template <class T>
__device__ __forceinline__ void copy4(float* dst, const T* src, int count, bool vectors) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, float>) {
        if (vectors) {
            cp_async<16>(dst, src, count > 0);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) cp_async<4>(dst + i, src + i, i < count);
        }
        return;
    }
#endif
    *reinterpret_cast<Float4*>(dst) = load4(src, count, vectors);
}

// Copies num_rows rows of num_cols (a power of two) into shared rows `stride` floats apart;
// `num_threads` threads together, kUnroll loads of each in flight. Rows from valid_rows on and
// columns from valid_cols on become zeros and are not read.
template <int kUnroll, class T>
__device__ __forceinline__ void copy_tile(float* dst, int stride, const T* src, int64_t row_stride,
                                          int num_rows, int num_cols, int valid_rows,
                                          int valid_cols, bool vectors, int thread,
                                          int num_threads) {
    const int log2_cols = __ffs(num_cols) - 1;
#pragma unroll kUnroll
    for (int i = 4 * thread; i < num_rows * num_cols; i += 4 * num_threads) {
        const int row = i >> log2_cols, col = i & (num_cols - 1);
        copy4(dst + row * stride + col, src + row * row_stride + col,
              row < valid_rows ? valid_cols - col : 0, vectors);
    }
}

// The matrices of one (batch, query head), and of the key/value head it reads.
template <class T>
struct Head {
    const T* q;
    const T* k;
    const T* v;
    T* o;

    // 32-bit divisions: the grid holds batch * num_heads blocks, so neither is larger.
    __device__ Head(const Problem& p, const Tensors& t, int head) {
        const int num_heads = static_cast<int>(p.num_heads);
        const int bidb = head / num_heads, bidh = head % num_heads;
        const int bidh_kv = bidh / (num_heads / static_cast<int>(p.num_heads_kv));
        q = static_cast<const T*>(t.q_ptr) + bidb * t.q_batch_stride + bidh * t.q_head_stride;
        k = static_cast<const T*>(t.k_ptr) + bidb * t.k_batch_stride + bidh_kv * t.k_head_stride;
        v = static_cast<const T*>(t.v_ptr) + bidb * t.v_batch_stride + bidh_kv * t.v_head_stride;
        o = static_cast<T*>(t.o_ptr) + bidb * t.o_batch_stride + bidh * t.o_head_stride;
    }
};

}  // namespace fa101
