// The mask on fragments, and what it takes for a hidden key to have no effect at all.
#pragma once

#include "common/mask.h"

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
    CUTE_UNROLL
    for (int r = 0; r < size<0>(s); ++r) {
        const int end = mask.key_end(get<0>(coord(r, 0)));
        CUTE_UNROLL
        for (int c = 0; c < size<1>(s); ++c) {
            if (get<1>(coord(r, c)) >= end) s(r, c) = -std::numeric_limits<float>::infinity();
        }
    }
}

// A hidden key has weight 0, but 0 * NaN = NaN: where a block of keys is visible to some rows and
// not to others, a NaN or inf in its V would reach rows that may not see it. Such blocks are looked
// at when they arrive; if one holds such a value (hardly ever) the matrix product gets 0 in its
// place and the value itself is added to the rows that do see it.

// 16-bit floats with all exponent bits set, two per word: adding the lowest exponent bit carries
// into the sign bit.
template <class Element>
struct NonFinite {
    static constexpr bool kHalf = std::is_same_v<Element, cutlass::half_t>;
    static constexpr uint32_t kExponent = kHalf ? 0x7c007c00u : 0x7f807f80u;
    static constexpr uint32_t kLowest = kHalf ? 0x04000400u : 0x00800080u;
    CUTE_DEVICE static uint32_t find(uint32_t word) {
        return ((word & kExponent) + kLowest) & 0x80008000u;
    }
};

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
        for (int j = 0; j < size(words); ++j) found |= NonFinite<Element>::find(words(j));
    }
    return found != 0;
}

// Replaces the NaNs and infs of v (block_n, head_dim) by 0 and writes to row j of `sums` what a
// query that sees keys [0, j] of the block shall get in their place: their sum. All threads take
// part.
template <class V, class Element>
CUTE_DEVICE void take_out_nonfinite(V&& v, Element* sums, int thread, int num_threads) {
    using namespace cute;
    CUTE_NO_UNROLL
    for (int col = thread; col < size<1>(v); col += num_threads) {
        float sum = 0.0f;
        CUTE_NO_UNROLL
        for (int j = 0; j < size<0>(v); ++j) {
            const Element value = v(j, col);
            if (NonFinite<Element>::find(value.storage)) {
                sum += float(value);
                v(j, col) = Element(0);
            }
            sums[j * size<1>(v) + col] = Element(sum);
        }
    }
}

// Adds to acc (rows, cols) its queries' rows of `sums`; coord and mask as above.
template <int kBlockN, int kHeadDim, class Element, class Acc, class Coord>
CUTE_DEVICE void add_nonfinite(const Element* sums, Acc& acc, Coord const& coord,
                               TileMask const& mask) {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(acc); ++r) {
        const int visible = min(mask.key_end(get<0>(coord(r, 0))), kBlockN);
        if (visible == 0) continue;
        const Element* row = sums + (visible - 1) * kHeadDim;
        CUTE_UNROLL
        for (int c = 0; c < size<1>(acc); ++c) acc(r, c) += float(row[get<1>(coord(0, c))]);
    }
}

}  // namespace fa101
