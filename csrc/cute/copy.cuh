// Tiles between global and shared memory, 16 bytes a thread and step, with the edges handled here:
// rows past the end of the sequence and columns past head_dim are filled with zeros and never read,
// and never written.
//
// `aligned16` says that 16-byte accesses are legal, and then head_dim is a multiple of 8: a vector
// is inside or outside as a whole. If not, the same vectors move element by element, each with a
// check of its own. It is the same for all threads, so the branch costs next to nothing.
#pragma once

#include "common/warp.cuh"

#include <cute/tensor.hpp>

namespace fa101 {

// The tile of a row-major matrix that starts at first_row. The stride is made opaque: its
// multiples would be kept in registers over the whole loop.
template <class Shape, class Element>
CUTE_DEVICE auto gmem_tile(Element* ptr, int64_t row_stride, int first_row) {
    using namespace cute;
    asm volatile("" : "+l"(row_stride));
    return make_tensor(make_gmem_ptr(ptr + first_row * row_stride), Shape{},
                       make_stride(row_stride, _1{}));
}

// One thread's share of a tile, global to shared; (CPY=8, rows, cols) each. Aligned, it is
// asynchronous: the data is there after cp_async_wait and, for other threads, a barrier.
// coord gives the place of each vector in the tile.
template <class Src, class Dst, class Coord, class NumRows>
CUTE_DEVICE void load_tile(Src const& src, Dst&& dst, Coord const& coord, NumRows num_rows,
                           int num_cols, bool aligned16) {
    using namespace cute;
    using Element = typename Src::value_type;
    auto inside = [&](int j, int r, int c) {
        return get<0>(coord(0, r, 0)) < num_rows && get<1>(coord(j, 0, c)) < num_cols;
    };
    if (aligned16) {
        Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element> copy_async;
        CUTE_UNROLL
        for (int r = 0; r < size<1>(src); ++r) {
            CUTE_UNROLL
            for (int c = 0; c < size<2>(src); ++c) {
                copy(copy_async.with(inside(0, r, c)), src(_, r, c), dst(_, r, c));
            }
        }
    } else {
        CUTE_NO_UNROLL
        for (int i = 0; i < size<1>(src) * size<2>(src); ++i) {
            const int r = i % size<1>(src), c = i / size<1>(src);
            Tensor vector = make_fragment_like(dst(_, r, c));
            CUTE_UNROLL
            for (int j = 0; j < size(vector); ++j) {
                vector(j) = inside(j, r, c) ? src(j, r, c) : Element(0);
            }
            copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{}, vector, dst(_, r, c));
        }
    }
}

// The way back, shared to global.
template <class Src, class Dst, class Coord>
CUTE_DEVICE void store_tile(Src const& src, Dst&& dst, Coord const& coord, int num_rows,
                            int num_cols, bool aligned16) {
    using namespace cute;
    using Element = typename Src::value_type;
    Copy_Atom<UniversalCopy<uint128_t>, Element> copy_vector;
    CUTE_NO_UNROLL
    for (int i = 0; i < size<1>(src) * size<2>(src); ++i) {
        const int r = i % size<1>(src), c = i / size<1>(src);
        if (get<0>(coord(0, r, 0)) >= num_rows || get<1>(coord(0, 0, c)) >= num_cols) continue;
        Tensor vector = make_fragment_like(src(_, r, c));
        copy(copy_vector, src(_, r, c), vector);
        if (aligned16) {
            copy(copy_vector, vector, dst(_, r, c));
        } else {
            CUTE_UNROLL
            for (int j = 0; j < size(vector); ++j) {
                if (get<1>(coord(j, 0, c)) < num_cols) dst(j, r, c) = vector(j);
            }
        }
    }
}

}  // namespace fa101
