// Register fragments of the m16n8k16 tensor-core instruction, seen the way the arithmetic needs
// them, and the warp-level matrix product that feeds it from shared memory.
//
// One mma.sync multiplies A (16 x 16, rows of queries) by B (8 x 16, rows of keys) into C (16 x 8).
// Lane t of the warp owns, with g = t / 4 and q = 2 * (t % 4):
//
//     C  4 floats   (g, q) (g, q+1)   (g+8, q) (g+8, q+1)             two rows, two columns
//     A  8 halves   the same four, then the same four 8 columns on    two C tiles side by side
//
// so a pair of neighbouring C tiles, rounded to 16 bits, is the A operand of the next product: the
// softmax weights go from S = Q K^T to O = P V without leaving their registers.
#pragma once

#include "common/packed.cuh"

#include <cute/tensor.hpp>

#include <cstdint>

namespace fa101 {

// ((2 cols, 2 rows), MMA_M, MMA_N) -> ((2, MMA_M) rows, (2, MMA_N) cols): the thread's part of the
// accumulator as a little matrix. Also good for the coordinates that belong to it.
template <class Acc>
CUTE_DEVICE auto rows_and_cols(Acc&& acc) {
    using namespace cute;
    const auto l = acc.layout();
    return make_tensor(acc.data(), make_layout(make_layout(get<0, 1>(l), get<1>(l)),
                                               make_layout(get<0, 0>(l), get<2>(l))));
}

// ((2, 2), MMA_M, MMA_N) -> (((2, 2), 2), MMA_M, MMA_N / 2): two C tiles as one A operand.
template <class Acc>
CUTE_DEVICE auto as_a_operand(Acc&& acc) {
    using namespace cute;
    const auto l = logical_divide(acc.layout(), Shape<Underscore, Underscore, _2>{});
    return make_tensor(acc.data(),
                       make_layout(make_layout(get<0>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l)));
}

// A fragment rounded to 16 bits, two elements an instruction.
template <class Element, class Floats>
CUTE_DEVICE auto round_to(Floats const& x) {
    using namespace cute;
    Tensor y = make_tensor<Element>(x.layout());
    Tensor pairs = recast<uint32_t>(y);
    CUTE_UNROLL
    for (int i = 0; i < size(pairs); ++i) pairs(i) = pack<Element>(x(2 * i), x(2 * i + 1));
    return y;
}

// The A operand comes from registers: nothing to load.
struct InRegisters {
    CUTE_DEVICE void operator()(int) const {}
};

// C += A B^T for one warp. B comes from shared memory 16 x 16 values (one ldmatrix.x4, two mma
// tiles) at a time; `load_a(k)` brings the A operand of k-step k.
//
// Everything is unrolled, so that fragment indices are constants and a B value occupies registers
// only from its load to its use. ptxas moves the loads ahead of the products by itself, as far as
// registers allow: writing that as a pipeline of 1, 2 or 3 pieces gave the same machine code.
template <class TiledMma, class TiledCopyB, class C, class A, class SmemB, class LoadA>
CUTE_DEVICE void warp_gemm(TiledMma const& tiled_mma, TiledCopyB const& smem_tiled_copy_b,
                           C& tCrC,          // (MMA=4, MMA_M, MMA_N)
                           A const& tCrA,    // (MMA=8, MMA_M, MMA_K)
                           SmemB const& sB,  // (N, K)
                           int thread, LoadA&& load_a) {
    using namespace cute;
    using Element = typename A::value_type;
    const auto thr_copy = smem_tiled_copy_b.get_thread_slice(thread);
    Tensor tCsB = thr_copy.partition_S(sB);  // (CPY=8, N / 16, MMA_K)
    Tensor tCrB =
        make_tensor<Element>(partition_shape_B(tiled_mma, shape(sB)));  // (MMA=4, MMA_N, MMA_K)
    Tensor tCrB_copy = thr_copy.retile_D(tCrB);                         // (CPY=8, N / 16, MMA_K)
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCsB); ++k) {
        load_a(k);
        CUTE_UNROLL
        for (int n = 0; n < size<1>(tCsB); ++n) {
            copy(smem_tiled_copy_b, tCsB(_, n, k), tCrB_copy(_, n, k));
            CUTE_UNROLL
            for (int j = 2 * n; j < 2 * n + 2; ++j) {
                CUTE_UNROLL
                for (int m = 0; m < size<1>(tCrA); ++m) {
                    gemm(tiled_mma, tCrA(_, m, k), tCrB(_, j, k), tCrC(_, m, j));
                }
            }
        }
    }
}

}  // namespace fa101
