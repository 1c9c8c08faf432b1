// Layouts, products and shared memory of one compiled kernel.
#pragma once

#include "flash_attn_sm90/tile_config.h"

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <type_traits>

namespace fa101::sm90 {

// Which rows: of which (batch, pack of heads), from which on.
struct TileInfo {
    int m_begin;  // negative: there are no more tiles
    int bidh;     // the pack's first head
    int bidb;
    int split = 0;  // which part of the keys
};

// kConfig is a function of the head_dims that gives the Config: C++17 has no class values as
// arguments.
template <class Element_, int kHeadDim_, int kHeadDimV_, Config (*kConfig)(int, int),
          bool kHasExtras_ = false, bool kSplits_ = false, bool kPacks_ = true>
struct KernelTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr Config kTile = kConfig(kHeadDim, kHeadDimV);
    static constexpr int kGroups = kTile.groups;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
    static constexpr int kStages = kTile.stages;
    static constexpr bool kHasExtras = kHasExtras_;
    static constexpr bool kSplits = kSplits_;  // parts of the keys, of caches whose lengths vary
    static constexpr bool kPacks = kPacks_;    // rows may be of several heads
    static constexpr bool kGuesses = !kHasExtras || kHeadDim < 256;  // there registers are short
    static constexpr int kGroupM = 64;                               // the rows of one wgmma
    static constexpr int kBlockM = kGroupM * kGroups;
    static constexpr bool kAtOnce = kTile.at_once;
    static constexpr int kWarps = kTile.num_warps(), kThreads = 32 * kWarps;
    static constexpr int kFirstConsumer = kWarps - 4 * kGroups;  // a warp

    // setmaxnreg: 65536 registers over the threads of all blocks, moved from the producer to the
    // consumers.
    static constexpr int kProducerRegisters = kHeadDimV > 192                     ? 24
                                              : kGroups == 3 || kBlocksPerSm == 2 ? 32
                                                                                  : 40;
    static constexpr int kConsumerRegisters = kBlocksPerSm == 2 ? 104
                                              : kGroups == 3    ? 160
                                              : kHeadDimV > 192 ? 240
                                                                : 232;

    // One TMA box is 64 elements (128 bytes, the swizzle's width) by a tile's rows; a tile is
    // head_dim / 64 boxes, one after the other. That is what these layouts say:
    //   row-major rows of 64 elements, 16-byte chunks of row r permuted by xor with r % 8.
    // head_dim 96 has boxes of 32 elements: a wgmma reads one stride, so a tile has one width.
    //   Rows of 64 bytes, two for each of the 128 that the banks hold: xor with r / 2 % 4.
    static constexpr int kBox = box_columns(kHeadDim);
    static_assert(kHeadDim % kBox == 0 && kHeadDimV % kBox == 0 && kHeadDim <= 256);
    static_assert(kBlockN % 16 == 0 && kBlockN <= 256);
    static_assert(!kAtOnce || (!kHasExtras && !kSplits));
    static_assert(kGroups == 2 ||
                  (kBlocksPerSm == 1 && (kGroups == 3 || (kGroups == 1 && kSplits))));

    // Boxes of O that a warp has on their way; none at 192, where shared memory is full, and of
    // parts, which are float32.
    static constexpr int kStagesO = kHeadDim == 192 || kSplits ? 0 : 2;

    // Whether a tile's first product runs under the epilogue of the tile before. That takes room
    // for Q twice and for S beside O and what O's rows need.
    static constexpr bool kStartsAhead =
        kGroups == 2 && kBlocksPerSm == 1 && kHeadDim <= 128 && !kHasExtras && !kSplits;
    static constexpr int kStagesQ = kStartsAhead ? 2 : 1;

    using AtomK = std::conditional_t<kBox == 64, cute::SM90::GMMA::Layout_K_SW128_Atom<Element>,
                                     cute::SM90::GMMA::Layout_K_SW64_Atom<Element>>;
    using AtomMN = std::conditional_t<kBox == 64, cute::SM90::GMMA::Layout_MN_SW128_Atom<Element>,
                                      cute::SM90::GMMA::Layout_MN_SW64_Atom<Element>>;
    using SmemLayoutQ = decltype(cute::tile_to_shape(
        AtomK{}, cute::Shape<cute::Int<kGroupM>, cute::Int<kHeadDim>,
                             cute::Int<kStagesQ>>{}));  // (64, HeadDim, StagesQ), one group's
    using SmemLayoutK = decltype(cute::tile_to_shape(
        AtomK{}, cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>,
                             cute::Int<kStages>>{}));  // (BlockN, HeadDim, Stages)
    // V as it came, (BlockN, HeadDimV), read as its transpose: wgmma takes 16-bit operands in
    // either order.
    using SmemLayoutVt = decltype(cute::tile_to_shape(
        AtomMN{}, cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>, cute::Int<kStages>>{},
        cute::Step<cute::_2, cute::_1, cute::_3>{}));  // (HeadDimV, BlockN, Stages)

    // S = Q K^T, both from shared memory; O += P V, P from registers. Each for one group.
    using TiledMmaQK = decltype(cute::make_tiled_mma(
        cute::SM90::GMMA::ss_op_selector<
            Element, Element, float,
            cute::Shape<cute::Int<kGroupM>, cute::Int<kBlockN>, cute::Int<kHeadDim>>>()));
    // Of the first half of a block, where registers last for that.
    static constexpr bool kHasHalf = kHeadDim == 64 && kGroups == 3 && !kPacks;
    static constexpr int kHalfN = kHasHalf ? 64 : kBlockN;
    using TiledMmaHalfQK = decltype(cute::make_tiled_mma(
        cute::SM90::GMMA::ss_op_selector<
            Element, Element, float,
            cute::Shape<cute::Int<kGroupM>, cute::Int<kHalfN>, cute::Int<kHeadDim>>>()));
    using TiledMmaPV = decltype(cute::make_tiled_mma(
        cute::SM90::GMMA::rs_op_selector<
            Element, Element, float,
            cute::Shape<cute::Int<kGroupM>, cute::Int<kHeadDimV>, cute::Int<kBlockN>>,
            cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>()));
    static_assert(decltype(size(TiledMmaQK{}))::value == 128);
    // One instruction wide, whatever multiple of 8: see CMakeLists.txt.
    static_assert(decltype(cute::tile_size<1>(TiledMmaQK{}))::value == kBlockN &&
                  decltype(cute::tile_size<1>(TiledMmaPV{}))::value == kHeadDimV);

    using FullBarrier = cutlass::arch::ClusterTransactionBarrier;  // counts TMA's bytes
    using EmptyBarrier = cutlass::arch::ClusterBarrier;

    struct alignas(1024) SharedStorage {
        alignas(1024) Element q[kGroups][kStagesQ][kGroupM * kHeadDim];
        alignas(1024) Element k[kStages][kBlockN * kHeadDim];
        alignas(1024) Element v[kStages][kBlockN * kHeadDimV];
        FullBarrier q_full[kGroups][kStagesQ], k_full[kStages], v_full[kStages];
        EmptyBarrier q_empty[kGroups][kStagesQ], k_empty[kStages], v_empty[kStages];
        EmptyBarrier tile_full, tile_empty;
        // The next tile, its mask and its key blocks, worked out ahead by a warp of its own.
        // Volatile, as the compiler would move plain accesses past a barrier.
        volatile int tile_m_begin, tile_bidh, tile_bidb, tile_head_kv;
        volatile int tile_first_key_begin, tile_first_key_end, tile_num_blocks;
        volatile int tile_num_keys, tile_first_block, tile_split;  // where keys are split
        // Where each warp turns its 16 rows of O from how wgmma spreads them into whole lines.
        alignas(1024) Element o[4 * kGroups][kStagesO][16 * kBox];
    };
    static constexpr int kSmemBytes = sizeof(SharedStorage);
    static_assert(kBlocksPerSm * (kSmemBytes + 1024) <= 228 * 1024);  // a block's 1 KB is reserved
};

}  // namespace fa101::sm90
