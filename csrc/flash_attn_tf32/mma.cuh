// float32 products on tensor cores: x = big + small, both TF32 (float32 with 10 of its 23 bits
// behind the point), and a * b as three products, small * big + big * small + big * big. What is
// dropped, small * small, is at most 2^-22 of a * b, float32's own rounding error. (The idea is
// CUTLASS's 3xTF32; Ootomo & Yokota 2022, arXiv 2203.03341, measure its errors.)
//
// Two more things keep the error at float32's level:
//   big is x rounded, not cut, so that small has either sign and the dropped terms cancel;
//   tensor cores cut, not round, each sum they make. So at most kSteps of them run into one
//   accumulator, the small products first, and the results are added by FADD, which rounds.
//
// mma.m16n8k8: lane t owns, with g = t / 4 and q = t % 4,
//     A (16 x 8)   (g, q) (g+8, q) (g, q+4) (g+8, q+4)
//     B (8 x 8)    (q, g) (q+4, g)                           k first
//     C (16 x 8)   (g, 2q) (g, 2q+1) (g+8, 2q) (g+8, 2q+1)
#pragma once

#include <cstdint>

namespace fa101::tf32 {

// An mma step is 8 deep; so many of them are summed by the tensor cores.
constexpr int kSteps = 2;

template <int kSize>
struct Split {
    uint32_t big[kSize], small[kSize];

    // Three instructions. A NaN or inf, or a value that big rounds to inf, makes small NaN, and so
    // the result (see the kernel).
    __device__ __forceinline__ void set(int i, float x) {
        big[i] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
        small[i] = __float_as_uint(x - __uint_as_float(big[i]));  // exact
    }
};

__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += A B for the kM x kN tiles of c from (first_m, first_n) on, kSteps deep. Neighbouring
// instructions belong to different tiles, so that none waits for the one before it.
template <int kAllM, int kAllN, int kM, int kN>
__device__ __forceinline__ void multiply_add(float (&c)[kAllM][kAllN][4], int first_m, int first_n,
                                             const Split<4> (&a)[kM][kSteps],
                                             const Split<2> (&b)[kN][kSteps]) {
    float sum[kM][kN][4] = {};
    const auto for_each = [&](auto&& mma) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
#pragma unroll
                for (int m = 0; m < kM; ++m) mma(sum[m][n], a[m][k], b[n][k]);
            }
        }
    };
    using Sum = float (&)[4];
    for_each([](Sum s, const Split<4>& x, const Split<2>& y) { mma_m16n8k8(s, x.small, y.big); });
    for_each([](Sum s, const Split<4>& x, const Split<2>& y) { mma_m16n8k8(s, x.big, y.small); });
    for_each([](Sum s, const Split<4>& x, const Split<2>& y) { mma_m16n8k8(s, x.big, y.big); });
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) c[first_m + m][first_n + n][i] += sum[m][n][i];
        }
    }
}

// Four matrices of 8 rows x 16 bytes; lane t gives the address of row t % 8 of matrix t / 8, and
// gets float t % 4 of row t / 4 of each.
__device__ __forceinline__ void ldmatrix_x4(float (&x)[4], const float* row) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address)
                 : "memory");
}

// From shared memory to fragments, 8 * kSteps = 16 deep; rows are kStride floats apart.

// A: rows of Q, or of P. The lane's address is at row t % 16, column t / 16 * 4.
template <int kStride, int kM>
__device__ __forceinline__ void load_rows(Split<4> (&a)[kM][kSteps], const float* row) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            float x[4];
            ldmatrix_x4(x, row + 16 * m * kStride + 8 * k);
#pragma unroll
            for (int i = 0; i < 4; ++i) a[m][k].set(i, x[i]);
        }
    }
}

// B of S = Q K^T: keys of K. The lane's address is at row t % 8, column t / 8 * 4.
template <int kStride, int kN>
__device__ __forceinline__ void load_k(Split<2> (&b)[kN][kSteps], const float* row) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
        float x[4];
        ldmatrix_x4(x, row + 8 * n * kStride);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[n][i / 2].set(i % 2, x[i]);
    }
}

// The sum over keys may take them in any order: in P V, k-slots q and q+4 stand for keys 2q and
// 2q+1. A: the weights, from where S has them.
template <int kM, int kN>
__device__ __forceinline__ void split_weights(Split<4> (&a)[kM][kSteps],
                                              const float (&s)[kM][kN][4], int first_n) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[m][k].set(i % 2 * 2 + i / 2, s[m][first_n + k][i]);
        }
    }
}

// B of O = P V: V, 8 bytes at a time. Of each pair of tiles, n-slot g of tile i stands for column
// 2g+i. The lane's address is at row 2q, column 2g.
template <int kStride, int kN>
__device__ __forceinline__ void load_v(Split<2> (&b)[kN][kSteps], const float* row) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto x =
                    *reinterpret_cast<const float2*>(row + (8 * k + i) * kStride + 8 * n);
                b[n][k].set(i, x.x);
                b[n + 1][k].set(i, x.y);
            }
        }
    }
}

// So the column of O at c[m][n][i], counted from the tiles' first.
__device__ __forceinline__ int o_col(int lane, int n, int i) {
    return n / 2 * 16 + lane % 4 * 4 + n % 2 + i % 2 * 2;
}

}  // namespace fa101::tf32
