// From q . k to the logits in base 2, on accumulator fragments, where more than a scale and the
// bounds of the mask is asked for: softcap, the caller's bias and boolean mask.
#pragma once

#include "common/online_softmax.h"
#include "cute/softmax.cuh"

#include <cute/tensor.hpp>

#include <cstdint>
#include <limits>

namespace fa101 {

// tanh with a relative error below 2^-19, so that the logit softcap * tanh(s / softcap) keeps that
// of s itself however large softcap is. tanh.approx has 2^-11: at softcap 50, logits off by 0.02.
//   |x| >= 1/4   1 - 2 / (e^2x + 1): the error is that of ex2.approx and of the division, 2^-22
//                each, and the result is at least 0.24. e^2x = inf gives 1, e^2x = 0 gives -1.
//   |x| <  1/4   there the difference cancels: the series to x^7, short by less than 2^-21 of it.
CUTE_DEVICE float tanh_approx(float x) {
    const float x2 = x * x;
    float series = fmaf(x2, -17.0f / 315, 2.0f / 15);
    series = fmaf(x2, series, -1.0f / 3);
    series = fmaf(x2 * series, x, x);
    const float y = 1.0f - __fdividef(2.0f, exp2_approx(2.0f * kLog2e * x) + 1.0f);
    return fabsf(x) < 0.25f ? series : y;
}

// From q . k, whose sign is right, to a logit in base 2. All factors are positive.
struct LogitScale {
    float log2;                     // the logit is log2 * s
    float softcap_in, softcap_out;  // with softcap: softcap_out * tanh(softcap_in * s)
};

template <class Logits>
CUTE_DEVICE void scale_logits(Logits& s, LogitScale const& scale) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(s); ++i) s(i) *= scale.log2;
}

template <class Logits>
CUTE_DEVICE void softcap_logits(Logits& s, LogitScale const& scale) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(s); ++i) {
        s(i) = scale.softcap_out * tanh_approx(scale.softcap_in * s(i));
    }
}

// Calls use(s(r, c), x) with the element x that belongs to the logit, of an array (query, key) that
// starts at the tile's first query and key. coord(r, c) is the place of s(r, c) in the tile, of
// which num_rows and num_keys exist; past them the last element stands in. kThreadsPerRow threads
// share a row of the tile.
template <int kThreadsPerRow, class Logits, class Coord, class Element, class Use>
CUTE_DEVICE void for_each_logit(Logits& s, Coord const& coord, const Element* array,
                                int64_t row_stride, int64_t key_stride, int num_rows, int num_keys,
                                Use const& use) {
    using namespace cute;
    struct alignas(2 * sizeof(Element)) Pair {
        Element x[2];
    };
    // A thread's logits come in pairs of neighbours (fragment.cuh).
    const bool pairs = key_stride == 1 && row_stride % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(array) % sizeof(Pair) == 0 &&
                       num_keys >= kThreadsPerRow * size<1>(s);
    CUTE_UNROLL
    for (int r = 0; r < size<0>(s); ++r) {
        // Opaque as in gmem_tile: its multiples would wait in registers for the next row.
        asm volatile("" : "+l"(key_stride));
        const int query = min(get<0>(coord(r, 0)), num_rows - 1);
        const Element* const row = array + query * row_stride;
        if (pairs) {
            CUTE_UNROLL
            for (int c = 0; c < size<1>(s); c += 2) {
                const Pair pair = *reinterpret_cast<const Pair*>(row + get<1>(coord(r, c)));
                use(s(r, c), pair.x[0]);
                use(s(r, c + 1), pair.x[1]);
            }
        } else {
            CUTE_UNROLL
            for (int c = 0; c < size<1>(s); ++c) {
                use(s(r, c), row[min(get<1>(coord(r, c)), num_keys - 1) * key_stride]);
            }
        }
    }
}

}  // namespace fa101
