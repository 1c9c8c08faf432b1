// The three instructions of a warp-level product, with 16-bit T, and the fragments they agree on.
// With g = lane / 4 and q = 2 * (lane % 4), a lane holds of
//
//     C (16 x 8)   c(0, 0..1) = C[g][q..q+1]     c(1, 0..1) = C[g+8][q..q+1]        float32
//     A (16 x 16)  a[0] = A[g][q..q+1]   a[1] = A[g+8][q..q+1]   a[2], a[3]: 8 columns on
//     B (16 x 8)   b[0] = B[q..q+1][g]   b[1] = B[q+8..q+9][g]
//
// so two neighbouring C tiles, rounded, are the A operand of the next product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fa101::flash_decode {

// Tile n of c (2 rows, 2 columns a tile) += A B.
template <class T, class C>
__device__ __forceinline__ void mma(C& c, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    float &c0 = c(0, 2 * n), &c1 = c(0, 2 * n + 1), &c2 = c(1, 2 * n), &c3 = c(1, 2 * n + 1);
    if constexpr (std::is_same_v<T, __half>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Four 8 x 8 matrices from shared memory; lane l has the address of row l % 8 of matrix l / 8.
// Lane l gets elements 2 * (l % 4), + 1 of row l / 4 of each; of column l / 4 with kTransposed.
template <bool kTransposed, class T>
__device__ __forceinline__ void ldmatrix(uint32_t (&b)[4], const T* row) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    if constexpr (kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(address)
                     : "memory");
    }
}

// 16 bytes global to shared, past L1, while the thread goes on; zeros where not `valid`.
__device__ __forceinline__ void cp_async16(void* dst, const void* src, bool valid) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(dst));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(src),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
}

// Not 0 where one of the two 16-bit floats in a word is NaN or inf, all exponent bits set: adding
// the lowest of them carries into the sign bit.
template <class T>
__device__ __forceinline__ uint32_t nonfinite(uint32_t word) {
    constexpr bool kHalf = std::is_same_v<T, __half>;
    constexpr uint32_t kExponent = kHalf ? 0x7c007c00u : 0x7f807f80u;
    constexpr uint32_t kLowest = kHalf ? 0x04000400u : 0x00800080u;
    return ((word & kExponent) + kLowest) & 0x80008000u;
}
template <class T>
__device__ __forceinline__ bool is_nonfinite(T x) {
    return nonfinite<T>(reinterpret_cast<const uint16_t&>(x)) != 0;
}

}  // namespace fa101::flash_decode
