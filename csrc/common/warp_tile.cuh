// The three steps of the inner loop of fa1 and fa2 for one warp: S = Q K^T, the online softmax,
// O += P V. The two kernels differ in the loops around them, which is the lesson.
//
// Operands come from shared memory four at a time. For kRows x kKeys outputs, four columns of Q and
// K cost kRows + kKeys loads (LDS.128) and 4 * kRows * kKeys multiply-adds (FFMA): 16 FFMA per load
// for 8 x 8, 10.7 for 8 x 4, 8 for 4 x 4 and 2 for one output per thread. Four keys of P and V cost
// kRows + kCols loads and 4 * kRows * kCols FFMA. An SM does 4 warp-wide FFMA and moves 128 bytes
// of shared memory per clock; a load whose lanes share addresses in pairs (warp_tile.h) moves 256
// bytes or less, so 8 FFMA per load would keep both busy all the time, and 16 leave room.
#pragma once

#include "common/mask.h"
#include "common/memory.cuh"
#include "common/online_softmax.h"
#include "common/warp.cuh"
#include "common/warp_tile.h"

#include <cstdint>

namespace fa101 {

__device__ __forceinline__ Float4 load_shared4(const float* src) {
    return *reinterpret_cast<const Float4*>(src);
}

// op over the lanes that share a row.
template <class W, class Op>
__device__ __forceinline__ float row_reduce(float x, Op op) {
#pragma unroll
    for (int bit = 2; bit < 2 * W::kLanesN; bit *= 2) x = op(x, __shfl_xor_sync(~0u, x, bit));
    return x;
}

// s += Q K^T over `depth` columns, a multiple of 4. `q` and `k` point at this lane's first row.
template <class W, int kStrideK>
__device__ __forceinline__ void multiply_qk(float (&s)[W::kRows][W::kKeys], const float* q,
                                            const float* k, int depth) {
#pragma unroll 1
    for (int d = 0; d < depth; d += 4) {
        Float4 k4[W::kKeys];
#pragma unroll
        for (int j = 0; j < W::kKeys; ++j) k4[j] = load_shared4(k + W::kLanesN * j * kStrideK + d);
#pragma unroll
        for (int i = 0; i < W::kRows; ++i) {
            const Float4 q4 = load_shared4(q + W::kLanesM * i * W::kStrideQ + d);
#pragma unroll
            for (int x = 0; x < 4; ++x) {
#pragma unroll
                for (int j = 0; j < W::kKeys; ++j) s[i][j] += q4.x[x] * k4[j].x[x];
            }
        }
    }
}

// After the sum and not before, in Q: a scale of any size, sign or precision stays exact.
template <class W>
__device__ __forceinline__ void scale_scores(float (&s)[W::kRows][W::kKeys], float scale) {
#pragma unroll
    for (int i = 0; i < W::kRows; ++i) {
#pragma unroll
        for (int j = 0; j < W::kKeys; ++j) s[i][j] *= scale;
    }
}

// -inf where this lane's query does not see its key; `row` and `key` are its first of each.
template <class W>
__device__ __forceinline__ void mask_scores(float (&s)[W::kRows][W::kKeys], const Mask& mask,
                                            int row, int key) {
#pragma unroll
    for (int i = 0; i < W::kRows; ++i) {
        const int num_visible = mask.key_end(row + W::kLanesM * i) - key;
#pragma unroll
        for (int j = 0; j < W::kKeys; ++j) {
            if (W::kLanesN * j >= num_visible) s[i][j] = -INFINITY;
        }
    }
}

// One step of the online softmax: s, in base-2 logits, becomes the weights P, which go to shared
// memory; o and row_sum are rescaled to the new maximum. row_sum is this lane's share of the sum.
template <class W>
__device__ __forceinline__ void softmax_step(float (&s)[W::kRows][W::kKeys],
                                             float (&row_max)[W::kRows], float (&row_sum)[W::kRows],
                                             float (&o)[W::kRows][W::kCols], float* p) {
#pragma unroll
    for (int i = 0; i < W::kRows; ++i) {
        float new_max = row_max[i];
#pragma unroll
        for (int j = 0; j < W::kKeys; ++j) new_max = fmaxf(new_max, s[i][j]);
        new_max = row_reduce<W>(new_max, [](float a, float b) { return fmaxf(a, b); });
        const float shift = safe_row_max(new_max);
        const float scores_scale = exp2_approx(row_max[i] - shift);
        row_max[i] = new_max;
        row_sum[i] *= scores_scale;
#pragma unroll
        for (int j = 0; j < W::kKeys; ++j) {
            const float weight = exp2_approx(s[i][j] - shift);
            row_sum[i] += weight;
            p[W::kLanesM * i * W::kStrideP + W::kLanesN * j] = weight;
        }
#pragma unroll
        for (int c = 0; c < W::kCols; ++c) o[i][c] *= scores_scale;
    }
}

// o += P V over `num_keys` keys, a multiple of 4. `p` points at this lane's first row, `v` at its
// first column. Only where sees(i, k) says that row i sees key k: see multiply_pv_masked.
template <class W, class Sees>
__device__ __forceinline__ void multiply_pv(float (&o)[W::kRows][W::kCols], const float* p,
                                            const float* v, int num_keys, const Sees& sees) {
#pragma unroll 1
    for (int key = 0; key < num_keys; key += 4) {
        Float4 p4[W::kRows];
#pragma unroll
        for (int i = 0; i < W::kRows; ++i) {
            p4[i] = load_shared4(p + W::kLanesM * i * W::kStrideP + key);
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
#pragma unroll
            for (int c = 0; c < W::kCols; c += 4) {
                const Float4 v4 = load_shared4(v + (key + x) * W::kHeadDim + W::kLanesN * c);
#pragma unroll
                for (int i = 0; i < W::kRows; ++i) {
                    if (!sees(i, key + x)) continue;
#pragma unroll
                    for (int y = 0; y < 4; ++y) o[i][c + y] += p4[i].x[x] * v4.x[y];
                }
            }
        }
    }
}

// Where every row sees every key.
template <class W>
__device__ __forceinline__ void multiply_pv(float (&o)[W::kRows][W::kCols], const float* p,
                                            const float* v, int num_keys) {
    multiply_pv<W>(o, p, v, num_keys, [](int, int) { return true; });
}

// A key that a row does not see has weight 0, but 0 * NaN is NaN. Leaving out such products (a
// predicate on each FFMA) lets only rows that see a key catch its NaN. `row` and `key` are this
// lane's first query and the chunk's first key.
template <class W>
__device__ __forceinline__ void multiply_pv_masked(float (&o)[W::kRows][W::kCols], const float* p,
                                                   const float* v, int num_keys, const Mask& mask,
                                                   int row, int key) {
    int num_visible[W::kRows];
#pragma unroll
    for (int i = 0; i < W::kRows; ++i) num_visible[i] = mask.key_end(row + W::kLanesM * i) - key;
    multiply_pv<W>(o, p, v, num_keys, [&](int i, int k) { return k < num_visible[i]; });
}

}  // namespace fa101
