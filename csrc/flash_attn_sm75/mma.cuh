// Turing's tensor-core instruction and what feeds it. mma.m16n8k8, halves in, float32 sums: lane t
// owns, with g = t / 4 and q = 2 * (t % 4),
//
//     A (16 x 8)   (g, q) (g, q+1) in one register, (g+8, q) (g+8, q+1) in the other
//     B (8 x 8)    (q, g) (q+1, g)                      k first
//     C (16 x 8)   (g, q) (g, q+1) (g+8, q) (g+8, q+1)
//
// so that a tile of C, rounded to halves, is the A of the next product.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace fa101::sm75 {

__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// Four matrices of 8 x 8 halves; lane t gives the address of row t % 8 of matrix t / 8, and gets of
// each elements (t / 4, 2 * (t % 4)) and the one beside it: B where rows are keys (K).
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&x)[4], const __half* row) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// The same of their transposes: B where columns are keys (V^T).
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&x)[4], const __half* row) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace fa101::sm75
