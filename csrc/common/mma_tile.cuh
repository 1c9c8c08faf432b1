// What kernels that issue mma.sync by hand share: a warp's tile of accumulators, float[kM][kN][4]
// for kM x kN mma tiles of 16 x 8, and the steps from S = Q K^T to the weights P on it. Lane t owns
// of each mma tile, with g = t / 4 and q = t % 4,
//
//     (g, 2q) (g, 2q+1) (g+8, 2q) (g+8, 2q+1)
//
// so that a row lies in the four lanes of a quad.
#pragma once

#include <fa101/params.h>

#include "common/bias_mask.h"
#include "common/host_device.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/warp.cuh"

#include <cstdint>

namespace fa101::mma {

template <int kM, int kN>
using Tile = float[kM][kN][4];

// Row and column of element i of mma tile (m, n), counted from those of the lane's first element.
FA101_HOST_DEVICE constexpr int row_of(int m, int i) { return 16 * m + i / 2 * 8; }
FA101_HOST_DEVICE constexpr int col_of(int n, int i) { return 8 * n + i % 2; }

template <int kM, int kN, class F>
__device__ __forceinline__ void for_each(Tile<kM, kN>& tile, F&& f) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) f(tile[m][n][i], m, n, i);
        }
    }
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INFINITY; }

// The matrix of one head. The batch index is made opaque, so that the pointer is worked out where
// it is used and not kept in registers.
template <class T>
__device__ __forceinline__ const T* head_ptr(const void* ptr, int64_t batch_stride,
                                             int64_t head_stride, int bidb, int bidh) {
    asm volatile("" : "+r"(bidb));
    return static_cast<const T*>(ptr) + bidb * batch_stride + bidh * head_stride;
}

// A lane's place in the tile of logits, and what is visible there.
struct LogitsPlace {
    TileMask mask;          // counts from the tile's first query and the block's first key
    int m_begin, num_rows;  // of the tile of queries
    int n_begin;            // of the block of keys
    int row, key;           // of the lane's first element, counted like the mask

    __device__ bool sees(const BiasMask& bias_mask, int m, int i, int k) const {
        const int r = row + row_of(m, i);
        return r < num_rows && mask.key_begin(r) <= k && k < mask.key_end(r) &&
               !bias_mask.hides(m_begin + r, n_begin + k);
    }
};

// From sums over d to base-2 logits, hidden ones -inf. kHasExtras: softcap, bias or mask; without
// them and where no bound cuts the tile (!is_masked) there is nothing to look at.
// make_bias_mask() gives the BiasMask, to_float(p) the value of an element of the bias.
template <bool kHasExtras, int kM, int kN, class MakeBiasMask, class ToFloat>
__device__ __forceinline__ void finish_logits(Tile<kM, kN>& s, const Problem& problem,
                                              const LogitsPlace& place, bool is_masked,
                                              MakeBiasMask&& make_bias_mask, ToFloat&& to_float) {
    if constexpr (!kHasExtras) {
        for_each(s, [&](float& x, int, int, int) { x *= problem.softmax_scale * kLog2e; });
        if (!is_masked) return;
    }
    const BiasMask bias_mask = make_bias_mask();
    float softcap = problem.softcap;
    asm volatile("" : "+f"(softcap));  // its inverse is made anew in every step, not kept
    const float inverse_softcap = 1.0f / softcap;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = place.row + row_of(m, i);
            const int begin = place.mask.key_begin(row);
            const int end = row < place.num_rows ? place.mask.key_end(row) : 0;
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                float& x = s[m][n][i];
                const int key = place.key + col_of(n, i);
                bool is_visible = begin <= key && key < end;
                if constexpr (kHasExtras) {
                    x *= problem.softmax_scale;
                    if (softcap > 0) x = softcap * tanhf(x * inverse_softcap);
                    const int64_t query = place.m_begin + row, column = place.n_begin + key;
                    is_visible = is_visible && !bias_mask.hides(query, column);
                    x *= kLog2e;
                    if (is_visible && bias_mask.bias != nullptr) {
                        x += base2_bias(to_float(bias_mask.bias_at(query, column)));
                    }
                }
                if (!is_visible) x = -INFINITY;
            }
        }
    }
}

// The online softmax of common/online_softmax.h on a warp's 16 * kM rows. m follows the maximum
// only when that is more than kSlack powers of two ahead (cute/softmax.cuh says why that is
// enough), so O is hardly ever rescaled.
template <int kM>
struct OnlineSoftmax {
    static constexpr float kSlack = 8.0f;

    float row_max[kM][2];
    float row_sum[kM][2];  // over this lane's columns

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) row_max[m][i] = -INFINITY, row_sum[m][i] = 0.0f;
        }
    }

    // Logits become weights; o and l follow where the maximum moves.
    template <int kN, int kCols>
    __device__ __forceinline__ void step(Tile<kM, kN>& s, Tile<kM, kCols>& o) {
        float rescale[kM][2];
        bool moves = false;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float block_max = -INFINITY, block_sum = 0.0f;
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    block_max = fmaxf(block_max, fmaxf(s[m][n][2 * i], s[m][n][2 * i + 1]));
                }
                block_max = quad_max(block_max);
                const bool moves_row = block_max > row_max[m][i] + kSlack;
                const float new_max = moves_row ? block_max : row_max[m][i];
                const float shift = safe_row_max(new_max);
#pragma unroll
                for (int n = 0; n < kN; ++n) {
#pragma unroll
                    for (int j = 2 * i; j < 2 * i + 2; ++j) {
                        s[m][n][j] = exp2_approx(s[m][n][j] - shift);
                        block_sum += s[m][n][j];
                    }
                }
                rescale[m][i] = moves_row ? exp2_approx(row_max[m][i] - shift) : 1.0f;
                row_sum[m][i] = row_sum[m][i] * rescale[m][i] + block_sum;
                moves |= moves_row;
                row_max[m][i] = new_max;
            }
        }
        if (!__any_sync(~0u, moves)) return;
        for_each(o, [&](float& x, int m, int, int i) { x *= rescale[m][i / 2]; });
    }

    // True when a NaN or inf came out, in o or in l.
    template <int kCols>
    __device__ __forceinline__ bool has_nonfinite(Tile<kM, kCols>& o) const {
        float probe = 0.0f;  // 0 * x is 0 or, for a NaN or inf, NaN
#pragma unroll
        for (int m = 0; m < kM; ++m) probe += 0.0f * row_sum[m][0] + 0.0f * row_sum[m][1];
        for_each(o, [&](float& x, int, int, int) { probe += 0.0f * x; });
        return probe != 0.0f;
    }
};

// Adds to o the NaNs and infs of num_keys keys of V where the row sees the key: what the product,
// from which they are taken out, would have given. value(key, n, i) is the V that belongs to
// element i of mma tile n; sees(m, i, key) says whether its row sees the key.
template <int kM, int kCols, class Value, class Sees>
__device__ __forceinline__ void add_nonfinite(Tile<kM, kCols>& o, int num_keys, Value&& value,
                                              Sees&& sees) {
#pragma unroll 1
    for (int key = 0; key < num_keys; ++key) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            const bool sees_key[2] = {sees(m, 0, key), sees(m, 2, key)};
#pragma unroll
            for (int n = 0; n < kCols; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float v = value(key, n, i);
                    if (sees_key[i / 2] && !is_finite(v)) o[m][n][i] += v;
                }
            }
        }
    }
}

}  // namespace fa101::mma
