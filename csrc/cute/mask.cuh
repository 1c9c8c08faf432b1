// The mask on fragments, and what it takes for a hidden key to have no effect at all.
#pragma once

#include "common/mask.h"
#include "common/packed.cuh"

#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <limits>
#include <type_traits>

namespace fa101 {

// Hidden logits become -inf. coord(r, c) is the place of s(r, c) in the tile, from whose first
// query and key `mask` counts.
template <class Logits, class Coord>
CUTE_DEVICE void mask_logits(Logits& s, Coord const& coord, TileMask const& mask) {
    using namespace cute;
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    CUTE_UNROLL
    for (int r = 0; r < size<0>(s); ++r) {
        const int end = mask.key_end(get<0>(coord(r, 0)));
        CUTE_UNROLL
        for (int c = 0; c < size<1>(s); ++c) {
            if (get<1>(coord(r, c)) >= end) s(r, c) = kHidden;
        }
    }
    // The left bound rarely touches a block, and of a thread's rows the last one first.
    if (mask.key_begin(get<0>(coord(size<0>(s) - 1, 0))) == 0) return;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(s); ++r) {
        const int begin = mask.key_begin(get<0>(coord(r, 0)));
        CUTE_UNROLL
        for (int c = 0; c < size<1>(s); ++c) {
            if (get<1>(coord(r, c)) < begin) s(r, c) = kHidden;
        }
    }
}

// A hidden key has weight 0, but 0 * NaN = NaN: where a block of keys is visible to some rows and
// not to others, a NaN or inf in its V would reach rows that may not see it. Such blocks are looked
// at when they arrive. If one holds such a value (hardly ever), each row adds those that it sees,
// one by one, and then the matrix product gets 0 in their place.

// True when x holds a NaN or inf.
template <class Share>
CUTE_DEVICE bool has_nonfinite(Share const& x) {
    using namespace cute;
    using Element = typename Share::value_type;
    uint32_t found = 0;
    CUTE_UNROLL
    for (int i = 0; i < size<1>(x) * size<2>(x); ++i) {
        Tensor words = recast<const uint32_t>(x(_, i % size<1>(x), i / size<1>(x)));
        CUTE_UNROLL
        for (int j = 0; j < size(words); ++j) found |= nonfinite<Element>(words(j));
    }
    return found != 0;
}

// Adds to acc (rows, cols) the NaNs and infs of v (block_n, head_dim) that its queries see:
// sees(row, key), both counted from the tile's first. coord as above.
template <class Acc, class V, class Coord, class Sees>
CUTE_DEVICE void add_nonfinite(Acc& acc, V const& v, Coord const& coord, Sees const& sees) {
    using namespace cute;
    using Element = typename V::value_type;
    constexpr int kRows = decltype(size<0>(acc))::value;
    CUTE_NO_UNROLL
    for (int key = 0; key < size<0>(v); ++key) {
        bool is_visible[kRows];
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) is_visible[r] = sees(get<0>(coord(r, 0)), key);
        CUTE_UNROLL
        for (int c = 0; c < size<1>(acc); ++c) {
            const Element value = v(key, get<1>(coord(0, c)));
            if (!is_nonfinite(value)) continue;
            CUTE_UNROLL
            for (int r = 0; r < kRows; ++r) {
                if (is_visible[r]) acc(r, c) += float(value);
            }
        }
    }
}

// Replaces the NaNs and infs of x, a thread's share of V, by 0.
template <class Share>
CUTE_DEVICE void clear_nonfinite(Share&& x) {
    using namespace cute;
    using Element = typename std::remove_reference_t<Share>::value_type;
    CUTE_NO_UNROLL
    for (int i = 0; i < size(x); ++i) {
        if (is_nonfinite(Element(x(i)))) x(i) = Element(0);
    }
}

}  // namespace fa101
