// Layouts, products and shared memory of one compiled kernel.
#pragma once

#include "flash_attn_sm90/kernel_traits.h"
#include "flash_attn_sm90_split_d/tile_config.h"

namespace fa101::sm90_split_d {

template <class Element_, int kHeadDim_, int kCluster_>
struct KernelTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kCluster = kCluster_;  // blocks that share K
    static constexpr bool kSplitsColumns = splits_columns(kHeadDim);
    static constexpr int kClusterM = kSplitsColumns ? kBlockM : kBlockM * kCluster;
    static_assert(kCluster == 2 || (kCluster == 1 && !kSplitsColumns));

    static constexpr int kGroups = 2;  // consumer warpgroups
    static constexpr int kThreads = 128 * (1 + kGroups);
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    // A group's share: the keys of S, the columns of O.
    static constexpr int kGroupN = kBlockN / kGroups;
    static constexpr int kColumns = kHeadDim / kGroups / (kSplitsColumns ? 2 : 1);

    // TMA's boxes are 64 elements (128 bytes, the swizzle's width) wide. A slice of K is one box, a
    // slice of V as many as a group has columns, one after the other.
    static constexpr int kBox = 64;
    static constexpr int kStepK = 16;  // the keys of one wgmma of P V, and of a slice of V
    static constexpr int kSlots = num_slots(kHeadDim);
    static constexpr int kLag = lag(kHeadDim);
    static constexpr int kSlotElements = kGroupN * kBox;
    static constexpr int kSlotBytes = kSlotElements * sizeof(Element);
    static constexpr int kBytesV = kStepK * kColumns * sizeof(Element);
    static_assert(kColumns % kBox == 0 && kColumns <= 256 && kBytesV <= kSlotBytes);
    static_assert(kSlots % kCluster == 0 && kLag < kSlots && kLag <= kBlockN / kStepK);

    using SmemLayoutQ =
        decltype(cute::tile_to_shape(cute::SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                     cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>>{}));
    using SmemLayoutP = decltype(cute::tile_to_shape(
        cute::SM90::GMMA::Layout_K_SW128_Atom<Element>{},
        cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>, cute::_2>{}));
    using SmemLayoutK = decltype(cute::tile_to_shape(
        cute::SM90::GMMA::Layout_K_SW128_Atom<Element>{},
        cute::Shape<cute::Int<kGroupN>, cute::Int<kBox>>{}));  // of a slice
    // A slice of V as it came, (StepK, Columns), read as its transpose.
    using SmemLayoutVt = decltype(cute::tile_to_shape(
        cute::SM90::GMMA::Layout_MN_SW128_Atom<Element>{},
        cute::Shape<cute::Int<kColumns>, cute::Int<kStepK>>{}, cute::Step<cute::_2, cute::_1>{}));

    // Both operands from shared memory.
    using TiledMmaQK = decltype(cute::make_tiled_mma(
        cute::SM90::GMMA::ss_op_selector<
            Element, Element, float,
            cute::Shape<cute::Int<kBlockM>, cute::Int<kGroupN>, cute::Int<kBox>>>()));
    using TiledMmaPV = decltype(cute::make_tiled_mma(
        cute::SM90::GMMA::ss_op_selector<
            Element, Element, float,
            cute::Shape<cute::Int<kBlockM>, cute::Int<kColumns>, cute::Int<kStepK>>,
            cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>()));

    using FullBarrier = cutlass::arch::ClusterTransactionBarrier;  // counts TMA's bytes
    using EmptyBarrier = cutlass::arch::ClusterBarrier;

    struct alignas(1024) SharedStorage {
        alignas(1024) Element q[kBlockM * kHeadDim];
        alignas(1024) Element ring[kGroups][kSlots][kSlotElements];
        alignas(1024) Element p[2][kBlockM * kBlockN];
        volatile float row_stat[kGroups][kBlockM];  // maxima of S, at the end sums of P
        FullBarrier q_full, full[kGroups][kSlots];
        EmptyBarrier empty[kGroups][kSlots];
    };
    static constexpr int kSmemBytes = sizeof(SharedStorage);
    static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace fa101::sm90_split_d
