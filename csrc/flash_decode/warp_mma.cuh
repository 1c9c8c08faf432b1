// The three instructions of a warp-level product, with 16-bit T, and the fragments they agree on.
// With g = lane / 4 and q = 2 * (lane % 4), a lane holds of
//
//     C (16 x 8)   c(0, 0..1) = C[g][q..q+1]     c(1, 0..1) = C[g+8][q..q+1]        float32
//     A (16 x 16)  a[0] = A[g][q..q+1]   a[1] = A[g+8][q..q+1]   a[2], a[3]: 8 columns on
//     B (16 x 8)   b[0] = B[q..q+1][g]   b[1] = B[q+8..q+9][g]
//
// so two neighbouring C tiles, rounded, are the A operand of the next product.
#pragma once

#include "common/packed.cuh"

#include <cstdint>

namespace fa101::flash_decode {

// Tile n of c (2 rows, 2 columns a tile) += A B.
template <class T, class C>
__device__ __forceinline__ void mma(C& c, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    float &c0 = c(0, 2 * n), &c1 = c(0, 2 * n + 1), &c2 = c(1, 2 * n), &c3 = c(1, 2 * n + 1);
    if constexpr (kIsHalf<T>) {
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

// 16 bytes global to shared, past L1, while the thread goes on; zeros where not `valid`. L2 forgets
// them before others. The policy is the number that createpolicy makes of evict_first (CUTLASS's
// TMA::CacheHintSm90): a constant costs no registers.
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, bool valid) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint "
        "[%0], [%1], 16, %2, 0x12f0000000000000;" ::"r"(dst),
        "l"(src), "r"(valid ? 16 : 0)
        : "memory");
}

// What cp_async16 takes, plus constants and what differs between threads. Opaque: where the
// compiler moves the base of shared memory to the end of the sum, ptxas 13.0 adds it in the copy
// itself, beside a policy whose register it then encodes wrong (an illegal instruction).
__device__ __forceinline__ uint32_t copy_address(const void* dst) {
    uint32_t address;
    asm("mov.u32 %0, %1;"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(dst))));
    return address;
}

// Four codes of fp8 (common/float8.h) as T: the pairs of bytes 0 and 2, and of 1 and 3. A code
// moves to the top of T's exponent and mantissa, which is exact, subnormals too, but for the bias:
// bfloat16 is multiplied by the 2^120 that are missing, float16 is left too small by kE4M3Scale,
// for the caller to put into a factor that there is anyway: float16 has the range. What makes a
// code of NaN carry into bit 7 makes all bits of T ones, NaN again.
struct Pairs {
    uint32_t even, odd;
};
template <class T>
constexpr float kE4M3Scale = kIsHalf<T> ? 256.0f : 1.0f;

template <class T>
__device__ __forceinline__ Pairs widen_e4m3(uint32_t codes) {
    constexpr int kShift = kIsHalf<T> ? 1 : 4;  // bits of T's exponent more than of the code's
    constexpr uint32_t kMagnitude =
        (0x7f007f00u >> kShift) & (kIsHalf<T> ? 0x3f803f80u : 0x07f007f0u);
    const uint32_t carried = (codes & 0x7f7f7f7fu) + 0x01010101u;
    uint32_t even_nan, odd_nan;  // bit 7 of a byte, over both bytes of T
    asm("prmt.b32 %0, %1, 0, 0xaa88;" : "=r"(even_nan) : "r"(carried));
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(odd_nan) : "r"(carried));
    Pairs pairs;
    pairs.even = ((codes << (8 - kShift)) & kMagnitude) | ((codes << 8) & 0x80008000u) | even_nan;
    pairs.odd = ((codes >> kShift) & kMagnitude) | (codes & 0x80008000u) | odd_nan;
    if constexpr (!kIsHalf<T>) {
        const uint32_t scale = 0x7b807b80u, minus_zero = 0x80008000u;  // 2^120, -0
        asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pairs.even) : "r"(scale), "r"(minus_zero));
        asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pairs.odd) : "r"(scale), "r"(minus_zero));
    }
    return pairs;
}

}  // namespace fa101::flash_decode
