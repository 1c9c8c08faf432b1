// The arithmetic of the online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867), shared by
// every rung. For one query, after any prefix of its keys, the state is
//
//     row_max  m = max_j s_j                    row_sum  l = sum_j 2^(s_j - m)
//     acc      o = sum_j 2^(s_j - m) v_j
//
// with s_j the scaled logits times log2(e): exp2 is one instruction where exp is two. A larger
// maximum m' rescales what was summed before by 2^(m - m'); at the end O = o / l.
#pragma once

#include "common/host_device.h"

#include <cmath>

namespace fa101 {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// The value to subtract from logits. While every logit so far is -inf (masked) the maximum is -inf
// and -inf - -inf would be NaN; 0 keeps 2^(-inf - 0) = 0.
FA101_HOST_DEVICE float safe_row_max(float row_max) {
    return row_max == -INFINITY ? 0.0f : row_max;
}

// 1 / l, once per row at the end. A row that sees no key, or only keys whose logits are -inf (that
// is how a bias hides them), has l = 0 and gets 0: O = 0, as torch has it, instead of 0 / 0.
FA101_HOST_DEVICE float inverse_row_sum(float row_sum) {
    return row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
}

// The natural log-sum-exp from the base-2 state; -inf where l = 0.
FA101_HOST_DEVICE float log_sum_exp(float row_max, float row_sum) {
    return (row_max + log2f(row_sum)) * kLn2;
}

}  // namespace fa101
