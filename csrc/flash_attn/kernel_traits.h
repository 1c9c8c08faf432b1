// The types of one tile of fa2_cute: how shared memory is laid out and who copies and multiplies
// what.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

namespace fa101 {

template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNWarps_, int kStages_,
          bool kQInRegisters_, int kBlocksPerSm_, int kWarpsN_>
struct Fa2CuteTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockN = kBlockN_;
    static constexpr int kNWarps = kNWarps_;
    static constexpr int kNThreads = 32 * kNWarps;
    static constexpr int kStages = kStages_;
    static constexpr bool kQInRegisters = kQInRegisters_;
    static constexpr int kBlocksPerSm = kBlocksPerSm_;
    static constexpr int kWarpsN = kWarpsN_;

    static_assert(kWarpsN == 1 || kWarpsN == 2, "a warp has its rows alone or with one other");
    static_assert(kBlockM % (16 * kNWarps / kWarpsN) == 0, "a warp has whole 16-row mma tiles");
    static_assert(kBlockN % (16 * kWarpsN) == 0, "ldmatrix.x4 brings 16 keys at a time");
    static_assert(kHeadDim % 32 == 0, "the narrowest swizzled row is 32 elements");

    // Warps are stacked along the queries, each with kWarpM consecutive rows and all keys, so that
    // a row's softmax stays within a warp; or in pairs, which take turns along the keys of S and
    // the columns of O, 16 each. The 16 makes one ldmatrix.x4 two B tiles. The warps of a pair are
    // neighbours and thus on different quarters of the SM, each of which has a warp of another pair
    // to go on with while one waits.
    static constexpr int kWarpsM = kNWarps / kWarpsN;
    static constexpr int kWarpM = kBlockM / kWarpsM;
    using MmaAtom = std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                       cute::SM80_16x8x16_F32F16F16F32_TN,
                                       cute::SM80_16x8x16_F32BF16BF16F32_TN>;
    using RowsOfWarps =
        cute::Layout<cute::Shape<cute::_16, cute::Int<kWarpsM>, cute::Int<kWarpM / 16>>,
                     cute::Stride<cute::_1, cute::Int<kWarpM>, cute::_16>>;
    using ColumnsOfWarps = cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsN>, cute::_2>,
                                        cute::Stride<cute::_1, cute::_16, cute::_8>>;
    using TiledMma =
        cute::TiledMMA<cute::MMA_Atom<MmaAtom>,
                       cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>,
                                    cute::Stride<cute::Int<kWarpsN>, cute::_1, cute::_0>>,
                       cute::Tile<RowsOfWarps, ColumnsOfWarps, cute::_16>>;

    // Shared memory: panels of 64 (or 32) columns, so that a row of a panel is 128 (64) bytes, and
    // its 16-byte pieces permuted by XOR with the row number. Reading 8 rows of one column
    // (ldmatrix) and writing 8 pieces of one row (cp.async) then both touch all 32 banks once.
    static constexpr int kPanel = kHeadDim % 64 == 0 ? 64 : 32;
    using SmemAtom =
        decltype(cute::composition(cute::Swizzle<kPanel == 64 ? 3 : 2, 3, 3>{},
                                   cute::Layout<cute::Shape<cute::_8, cute::Int<kPanel>>,
                                                cute::Stride<cute::Int<kPanel>, cute::_1>>{}));
    using SmemLayoutQ = decltype(cute::tile_to_shape(
        SmemAtom{}, cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>>{}));
    using SmemLayoutKV = decltype(cute::tile_to_shape(
        SmemAtom{}, cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>, cute::Int<kStages>>{}));
    // V^T is V with its axes named the other way round; ldmatrix.trans does the rest.
    using SmemLayoutVt = decltype(cute::composition(
        SmemLayoutKV{},
        cute::Layout<cute::Shape<cute::Int<kHeadDim>, cute::Int<kBlockN>, cute::Int<kStages>>,
                     cute::Stride<cute::Int<kBlockN>, cute::_1, cute::Int<kBlockN * kHeadDim>>>{}));

    // What a pair of warps has in common: the weights, and a number for every row from either.
    struct Alone {};
    struct Pairs {
        using SmemLayoutP = decltype(cute::tile_to_shape(
            SmemAtom{}, cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>>{}));
        alignas(128) Element p[kBlockM * kBlockN];
        float row_values[kWarpsN][kBlockM];

        CUTE_DEVICE auto tile_p() {  // (BlockM, BlockN)
            return cute::make_tensor(cute::make_smem_ptr(p), SmemLayoutP{});
        }
    };

    // O leaves through the memory of Q.
    struct SharedStorage : std::conditional_t<kWarpsN == 1, Alone, Pairs> {
        alignas(128) Element q[cute::cosize_v<SmemLayoutQ>];
        alignas(128) Element k[cute::cosize_v<SmemLayoutKV>];
        alignas(128) Element v[cute::cosize_v<SmemLayoutKV>];
    };

    // Global memory: a row of a panel is read by consecutive threads, 16 bytes each.
    static constexpr int kThreadsPerRow = kPanel / 8;
    static_assert(kBlockN % (kNThreads / kThreadsPerRow) == 0, "every thread copies as much");
    using GmemTiledCopy = decltype(cute::make_tiled_copy(
        cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, Element>{},
        cute::Layout<cute::Shape<cute::Int<kNThreads / kThreadsPerRow>, cute::Int<kThreadsPerRow>>,
                     cute::Stride<cute::Int<kThreadsPerRow>, cute::_1>>{},
        cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));

    using SmemCopyAtom = cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>;
    using SmemCopyAtomTransposed = cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>;
    using SmemCopyAtomC = cute::Copy_Atom<cute::UniversalCopy<uint32_t>, Element>;
};

}  // namespace fa101
