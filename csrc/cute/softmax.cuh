// The online softmax on accumulator fragments. A row of the tile lives in the four lanes of a quad.
//
// The state of common/online_softmax.h does not need the maximum itself: any reference m works that
// is close enough to it that 2^(s - m) neither overflows nor loses what matters. So m follows the
// maximum lazily: only when a logit exceeds it by more than kSlack = 8 is m raised to the maximum
// and what was summed before rescaled. Weights stay below 2^8, far from fp16's 65504, and their
// relative precision is the same everywhere. After the first blocks this hardly ever happens, and
// the common step has neither the exchange between lanes nor the multiplication of all of O by
// 2^(m - m'): one vote instead. (FlashAttention-4 skips the rescaling the same way.) Each row
// decides for itself, so its result does not depend on the rows beside it.
#pragma once

#include "common/online_softmax.h"
#include "common/warp.cuh"

#include <cute/tensor.hpp>

#include <limits>

namespace fa101 {

template <int kRows>
struct OnlineSoftmax {
    static constexpr float kSlack = 8.0f;

    float row_max[kRows];  // m, the same in the four lanes of a row
    float row_sum[kRows];  // l over this lane's columns; finish() adds the lanes

    CUTE_DEVICE OnlineSoftmax() {
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
            row_max[r] = -std::numeric_limits<float>::infinity();
            row_sum[r] = 0.0f;
        }
    }

    // Replaces the logits s (rows, cols) by their weights 2^(scale * s - m) and rescales acc (rows,
    // cols) where m moves. scale > 0. The NaN of a logit is passed over by fmaxf and comes out as a
    // NaN weight.
    template <class Logits, class Acc>
    CUTE_DEVICE void step(Logits& s, Acc& acc, float scale) {
        float block_max[kRows];
        if (__any_sync(0xffffffffu, find_max(block_max, s, scale))) {
            CUTE_UNROLL
            for (int r = 0; r < kRows; ++r) raise(r, quad_max(block_max[r]), acc);
        }
        find_weights(s, row_sum, s, scale);
    }

    // The parts of a step. The maxima over this lane's columns, and whether one exceeds m too far.
    template <class Logits>
    CUTE_DEVICE bool find_max(float (&block_max)[kRows], Logits const& s, float scale) const {
        using namespace cute;
        bool exceeds = false;
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
            block_max[r] = s(r, 0);
            CUTE_UNROLL
            for (int c = 1; c < size<1>(s); ++c) block_max[r] = fmaxf(block_max[r], s(r, c));
            block_max[r] *= scale;
            exceeds |= block_max[r] > row_max[r] + kSlack;
        }
        return exceeds;
    }

    // Moves m of row r to the block's maximum if that exceeds it too far.
    template <class Acc>
    CUTE_DEVICE void raise(int r, float block_max, Acc& acc) {
        using namespace cute;
        if (block_max > row_max[r] + kSlack) {
            const float rescale = exp2_approx(row_max[r] - block_max);
            row_max[r] = block_max;
            row_sum[r] *= rescale;
            CUTE_UNROLL
            for (int c = 0; c < size<1>(acc); ++c) acc(r, c) *= rescale;
        }
    }

    // The weights, which may take the place of the logits, and their sum on top of `sum`.
    template <class Weights, class Logits>
    CUTE_DEVICE void find_weights(Weights& weights, float (&sum)[kRows], Logits const& s,
                                  float scale) const {
        using namespace cute;
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const float m = safe_row_max(row_max[r]);
            CUTE_UNROLL
            for (int c = 0; c < size<1>(s); ++c) {
                weights(r, c) = exp2_approx(s(r, c) * scale - m);
                sum[r] += weights(r, c);
            }
        }
    }

    // Adds the lanes' shares of l.
    CUTE_DEVICE void finish() {
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) row_sum[r] = quad_sum(row_sum[r]);
    }
};

}  // namespace fa101
