// Lesson 3: FlashAttention-2 on tensor cores, with CuTe. The loop is lesson 2's; new is how data
// reaches the arithmetic. mma.sync multiplies 16 x 16 by 16 x 8 values a warp and instruction, 16
// times what CUDA cores do in the same time, so everything around it has to be cheap.
//
//   global  --cp.async-->  shared, swizzled  --ldmatrix-->  registers  --mma.sync-->  registers
//
// A block owns kBlockM queries of one head, each of its warps kWarpM consecutive rows of them. Keys
// are visited from the last block to the first, so that those that need the mask come first:
//
//   step          n                     n-1                   n-2
//   cp.async      K V (n-1)             K V (n-2)             ...
//   each warp     QK  softmax  PV       QK  softmax  PV       ...
//
// One barrier a step says two things: all threads' shares of K and V (n) have landed, and all warps
// are done with the slot that the next copies overwrite. Within a step a warp is on its own; what
// keeps the tensor cores busy during one warp's softmax is another warp's product, which is why two
// blocks a multiprocessor beat one of twice the size.
//
// Registers decide the tile. Of the 255 of a thread (32-bit each), at head_dim 128 with 128 x 48
// and four warps: O 32 x 128 / 32 lanes = 128, S 48, fragments of Q 16 and of K or V about 12, m
// and l 8: 212, and the rest for addresses. The copies' addresses would take 20 more if kept over
// the loop, so they are worked out anew in every step (see reread_thread_index). At head_dim 64 O
// is half as large and all of Q stays in registers.
//
// Bounds (causal, window) and lengths cost the loop nothing: they say where it starts and ends and
// which steps check. Softcap, bias and mask stand between the products, on fragments, and are a
// kernel of their own (kHasExtras), so that the plain one keeps its registers. Bias and mask are
// read element by element where they are needed: 4 bytes of float32 bias for the 4 * head_dim FLOP
// of a logit leave head_dim FLOP a byte, all of it from memory unless heads share the bias. The
// V of a step whose keys some row may not see is searched for NaN and inf (cute/mask.cuh).
//
// Any head_dim up to the tile's is padded with zeros on the way in and cut on the way out.
//
// Bytes. Global: Q and O once, K and V once per tile of queries: 4 * head_dim bytes a key against
// 4 * head_dim * kBlockM FLOP, so kBlockM = 128 FLOP a byte, mostly served by L2 because blocks of
// one head run side by side. Shared: ldmatrix.x4 brings 512 bytes (4 cycles) that feed kWarpM / 8
// mma. With 32 rows a warp, S = Q K^T at head_dim 128 reads 5 such pieces for 12 mma, P V 8 for 32:
// both together keep shared memory busy for about 3/4 of the time of the tensor cores.
//
// Pairs. At head_dim 256 O of 32 rows would fill the registers, and with 16 rows a warp shared
// memory sets the pace. So two warps share 32 rows (kWarpsN = 2): of S = Q K^T each computes half
// the keys of the block, of O = P V half the columns. O is again 32 x 128 a warp, S 32 x 32. P V
// needs all of P, which therefore goes through shared memory; K and V are read half as often:
//
//   KB a step of 128 x 64           Q    K    V    P   cp.async  together
//   8 warps, 16 rows each          64  256  256    -     64        640    = 5120 cycles
//   4 pairs, 32 rows each         128  128  128   48     64        496    = 3968
//   (2048 mma at 1.6 to 2 cycles                                            3300 to 4100)
//
// One barrier of the 64 threads a step says that both halves of P are there and whether the maximum
// of some row has moved too far. P was written with the old one, at a venture; if it has moved, the
// warps exchange their maxima, rescale, and write P again. Both see the same maxima, so they decide
// alike. Each sums its own weights; the sums meet at the end.
//
// Next rung (sm90): wgmma reads its operands from shared memory by itself, once for 64 rows, TMA
// moves tiles without threads or addresses, and a warp that only loads leaves the registers to
// those that compute.
//
// Sources: Dao 2023 (arXiv 2307.08691) for the algorithm, the flash-attention repository for the
// idea of walking the keys backwards, CUTLASS's CuTe tutorials for the idioms.
#pragma once

#include <fa101/params.h>

#include "common/bias_mask.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "cute/copy.cuh"
#include "cute/fragment.cuh"
#include "cute/logits.cuh"
#include "cute/mask.cuh"
#include "cute/softmax.cuh"
#include "flash_attn/kernel_traits.h"
#include "flash_attn/pair.cuh"

#include <cute/tensor.hpp>

#include <cstdint>
#include <limits>

namespace fa101 {

// Q takes the sign of softmax_scale, which may be 0, and `scale` the rest.
template <class Traits, bool kHasExtras>
__global__ void __launch_bounds__(Traits::kNThreads, Traits::kBlocksPerSm)
    fa2_cute_kernel(Problem problem, Tensors tensors, LogitScale scale, int section_heads) {
    using namespace cute;
    using Element = typename Traits::Element;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr int kHeadDim = Traits::kHeadDim, kStages = Traits::kStages;
    constexpr int kNThreads = Traits::kNThreads, kWarpsN = Traits::kWarpsN;
    using TileQ = Shape<Int<kBlockM>, Int<kHeadDim>>;
    using TileKV = Shape<Int<kBlockN>, Int<kHeadDim>>;
    using TileS = Shape<Int<kBlockM>, Int<kBlockN>>;
    const auto thread = [] { return reread_thread_index<kNThreads>(); };

    // ---- Which tile ----
    // Section by section of so many heads as have their K and V in L2; in a section the tiles that
    // see most keys, if they differ, start first, and the short ones fill the gaps at the end.
    const int seqlen_q = static_cast<int>(problem.seqlen_q);
    const int num_heads = static_cast<int>(problem.num_heads);
    struct TileIndex {
        int m_begin, batch_head, batch, head;
    };
    const auto tile_index = [&](int block) -> TileIndex {
        const int num_m_blocks = ceil_div(seqlen_q, kBlockM);
        const int first_head = block / (section_heads * num_m_blocks) * section_heads;
        const int heads =
            min(section_heads, static_cast<int>(problem.batch) * num_heads - first_head);
        const int rest = block - first_head * num_m_blocks;
        const int m_block = num_m_blocks - 1 - rest / heads;
        const int batch_head = first_head + rest % heads;
        return {m_block * kBlockM, batch_head, batch_head / num_heads, batch_head % num_heads};
    };
    const TileIndex tile = tile_index(blockIdx.x);
    const int m_begin = tile.m_begin, bidb = tile.batch;
    const int bidh_kv = tile.head / (num_heads / static_cast<int>(problem.num_heads_kv));

    const Mask mask = mask_of(problem, tensors, bidb);
    const TileMask tile_mask = mask.tile(m_begin, kBlockM);
    const int m_end = min(m_begin + kBlockM, seqlen_q);
    const int n_block_begin = mask.n_block_begin(m_begin, kBlockN);
    const int n_block_end = mask.n_block_end(m_end, kBlockN);
    const int n_block_full_begin = mask.n_block_full_begin(m_end, kBlockN);
    const int n_block_full_end = mask.n_block_full_end(m_begin, kBlockN);

    // ---- Copies: tensors in global and shared memory, and this thread's part of them ----
    // Reading aid: tXsY is this thread's part, for the copy or product X, of tensor Y in shared
    // memory; g is global, r registers, c coordinates.
    const int head_dim = static_cast<int>(problem.head_dim);
    const int head_dim_v = static_cast<int>(problem.head_dim_v);
    const bool aligned16 = problem.aligned16;

    extern __shared__ __align__(128) unsigned char smem[];
    auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
    using LayoutQ = typename Traits::SmemLayoutQ;
    using LayoutKV = typename Traits::SmemLayoutKV;
    Tensor sQ = make_tensor(make_smem_ptr(shared.q), LayoutQ{});   // (BlockM, HeadDim)
    Tensor sK = make_tensor(make_smem_ptr(shared.k), LayoutKV{});  // (BlockN, HeadDim, Stages)
    Tensor sV = make_tensor(make_smem_ptr(shared.v), LayoutKV{});  // (BlockN, HeadDim, Stages)
    Tensor sVt = make_tensor(make_smem_ptr(shared.v),
                             typename Traits::SmemLayoutVt{});  // (HeadDim, BlockN, Stages)
    Tensor cQ = make_identity_tensor(TileQ{});                  // (i, j) -> (i, j)
    Tensor cKV = make_identity_tensor(TileKV{});
    Tensor cS = make_identity_tensor(TileS{});
    typename Traits::GmemTiledCopy gmem_tiled_copy;

    const auto load_kv = [&](int n_block, auto num_rows) {
        const int stage = n_block % kStages;
        const auto thr_copy = gmem_tiled_copy.get_thread_slice(thread());
        const int n_begin = n_block * kBlockN;
        const auto* k_ptr = static_cast<const Element*>(tensors.k_ptr) +
                            bidb * tensors.k_batch_stride + bidh_kv * tensors.k_head_stride;
        const auto* v_ptr = static_cast<const Element*>(tensors.v_ptr) +
                            bidb * tensors.v_batch_stride + bidh_kv * tensors.v_head_stride;
        Tensor gK = gmem_tile<TileKV>(k_ptr, tensors.k_row_stride, n_begin);  // (BlockN, HeadDim)
        Tensor gV = gmem_tile<TileKV>(v_ptr, tensors.v_row_stride, n_begin);  // (BlockN, HeadDim)
        Tensor tKVcKV = thr_copy.partition_S(cKV);                            // (CPY=8, rows, cols)
        load_tile(thr_copy.partition_S(gK), thr_copy.partition_D(sK(_, _, stage)), tKVcKV, num_rows,
                  head_dim, aligned16);
        load_tile(thr_copy.partition_S(gV), thr_copy.partition_D(sV(_, _, stage)), tKVcKV, num_rows,
                  head_dim_v, aligned16);
    };

    // ---- Products: fragments in registers ----
    typename Traits::TiledMma tiled_mma;
    using SmemCopyAtom = typename Traits::SmemCopyAtom;
    const auto smem_copy_a = make_tiled_copy_A(SmemCopyAtom{}, tiled_mma);
    const auto smem_copy_k = make_tiled_copy_B(SmemCopyAtom{}, tiled_mma);
    const auto smem_copy_v =
        make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, tiled_mma);
    const auto smem_copy_c = make_tiled_copy_C(typename Traits::SmemCopyAtomC{}, tiled_mma);
    Tensor tSrQ =
        make_tensor<Element>(partition_shape_A(tiled_mma, TileQ{}));  // (MMA=8, MMA_M, MMA_K)
    Tensor acc_o = partition_fragment_C(tiled_mma, TileQ{});          // (MMA=4, MMA_M, MMA_K)
    Tensor o = rows_and_cols(acc_o);                                  // (2 * MMA_M, 2 * MMA_K)
    constexpr int kRows = decltype(size<0>(o))::value;
    OnlineSoftmax<kRows> softmax;
    [[maybe_unused]] bool has_max = false;  // this warp has been through a step
    clear(acc_o);

    // Q or P from shared memory to fragments, k-step by k-step.
    const auto a_loader = [&](int thread, auto const& sA, auto& tCrA) {
        const auto thr_copy = smem_copy_a.get_thread_slice(thread);
        return [&, tCsA = thr_copy.partition_S(sA),  // (CPY=8, MMA_M, MMA_K)
                tCrA_copy = thr_copy.retile_D(tCrA)](int k) mutable {
            copy(smem_copy_a, tCsA(_, _, k), tCrA_copy(_, _, k));
        };
    };

    // ---- Prologue: Q, and K and V of the first kStages - 1 blocks ----
    if (n_block_end > n_block_begin) {
        const auto thr_copy = gmem_tiled_copy.get_thread_slice(thread());
        const auto* q_ptr = static_cast<const Element*>(tensors.q_ptr) +
                            bidb * tensors.q_batch_stride + tile.head * tensors.q_head_stride;
        Tensor gQ = gmem_tile<TileQ>(q_ptr, tensors.q_row_stride, m_begin);  // (BlockM, HeadDim)
        Tensor tQsQ = thr_copy.partition_D(sQ);                              // (CPY=8, rows, cols)
        load_tile(thr_copy.partition_S(gQ), tQsQ, thr_copy.partition_S(cQ), seqlen_q - m_begin,
                  head_dim, aligned16);
        CUTE_UNROLL
        for (int i = 0; i < kStages - 1; ++i) {
            const int n_block = n_block_end - 1 - i;
            if (n_block >= n_block_begin) {
                load_kv(n_block, tile_mask.num_keys - n_block * kBlockN);
            }
            cp_async_fence();
        }
        if (!(problem.softmax_scale > 0.0f)) {
            cp_async_wait<0>();  // this thread's part; the barrier below is for the others
            const Element sign(problem.softmax_scale < 0.0f ? -1.0f : 0.0f);
            CUTE_NO_UNROLL
            for (int i = 0; i < size(tQsQ); ++i) tQsQ(i) = tQsQ(i) * sign;
        }
        if constexpr (Traits::kQInRegisters) {
            cp_async_wait<kStages - 2>();
            __syncthreads();
            auto load_q = a_loader(thread(), sQ, tSrQ);
            CUTE_UNROLL
            for (int k = 0; k < size<2>(tSrQ); ++k) load_q(k);
        }
    }

    // ---- Logits: with extras, all that is left for the softmax is to subtract the maximum ----
    const auto finish_logits = [&](auto& s, auto const& s_coord, int n_block, auto is_masked) {
        const TileIndex here = tile_index(reread_block_index());
        const BiasMask bias_mask(problem, tensors, here.batch, here.head);
        const int n_begin = n_block * kBlockN;
        const auto for_each = [&](const auto* array, int64_t row_stride, int64_t key_stride,
                                  auto const& use) {
            for_each_logit<4 * kWarpsN>(
                s, s_coord, array + here.m_begin * row_stride + n_begin * key_stride, row_stride,
                key_stride, seqlen_q - here.m_begin, tile_mask.num_keys - n_begin, use);
        };
        if (problem.softcap > 0.0f) {
            softcap_logits(s, scale);
        } else {
            scale_logits(s, scale);
        }
        if (bias_mask.bias != nullptr) {
            const auto add = [](float& logit, auto bias) {
                logit += base2_bias(static_cast<float>(bias));
            };
            if (problem.dtype_bias == DType::kFloat32) {
                for_each(static_cast<const float*>(bias_mask.bias), bias_mask.bias_row_stride,
                         bias_mask.bias_key_stride, add);
            } else {
                for_each(static_cast<const Element*>(bias_mask.bias), bias_mask.bias_row_stride,
                         bias_mask.bias_key_stride, add);
            }
        }
        if (decltype(is_masked)::value && bias_mask.mask != nullptr) {
            for_each(bias_mask.mask, bias_mask.mask_row_stride, bias_mask.mask_key_stride,
                     [](float& logit, uint8_t is_visible) {
                         if (!is_visible) logit = -std::numeric_limits<float>::infinity();
                     });
        }
    };

    // ---- Weights: rounded, in registers (MMA=4, MMA_M, MMA_N), or of a pair in shared memory, and
    //      then what is returned is the A operand yet to be loaded (MMA=8, MMA_M, MMA_K) ----
    const auto weights_of = [&](auto& acc_s, auto const& s_coord, auto is_masked,
                                [[maybe_unused]] auto thread) {
        Tensor s = rows_and_cols(acc_s);
        const float scale_log2 = kHasExtras ? 1.0f : scale.log2;
        if constexpr (kWarpsN == 1) {
            softmax.step(s, o, scale_log2);
            return round_to<Element>(acc_s);
        } else {
            float block_max[kRows], other_max[kRows], sum[kRows];
            // The first step has no maximum to try. A step without masks tries nevertheless: asking
            // would part its exp2 from the last products of Q K^T, which run at the same time.
            bool tries = !decltype(is_masked)::value || has_max;
            bool exceeds = softmax.find_max(block_max, s, scale_log2) || !tries;
            has_max = true;
            CUTE_NO_UNROLL
            while (true) {  // at most two rounds
                if (tries) {
                    Tensor acc_p = make_fragment_like(acc_s);
                    Tensor p = rows_and_cols(acc_p);
                    CUTE_UNROLL
                    for (int r = 0; r < kRows; ++r) sum[r] = 0.0f;
                    softmax.find_weights(p, sum, s, scale_log2);
                    // Summed now: the weights must not wait in registers for the partner.
                    CUTE_UNROLL
                    for (int r = 0; r < kRows; ++r) asm volatile("" : "+f"(sum[r]));
                    Tensor rP = round_to<Element>(acc_p);
                    const auto thr_copy = smem_copy_c.get_thread_slice(thread());
                    copy(smem_copy_c, thr_copy.retile_S(rP), thr_copy.partition_D(shared.tile_p()));
                }
                if (!pair_any(thread() / 64, exceeds)) break;
                exceeds = false;
                tries = true;
                CUTE_UNROLL
                for (int r = 0; r < kRows; ++r) block_max[r] = quad_max(block_max[r]);
                pair_exchange(thread() / 32, block_max, other_max, shared.row_values, s_coord);
                CUTE_UNROLL
                for (int r = 0; r < kRows; ++r) {
                    softmax.raise(r, fmaxf(block_max[r], other_max[r]), o);
                }
            }
            CUTE_UNROLL
            for (int r = 0; r < kRows; ++r) softmax.row_sum[r] += sum[r];
            return make_tensor<Element>(partition_shape_A(tiled_mma, TileS{}));
        }
    };

    // ---- Main loop ----
    // Always inline: as a call it would spill all of its state.
    const auto step = [&](int n_block, auto is_masked) __attribute__((always_inline)) {
        constexpr bool kIsMasked = decltype(is_masked)::value;
        const int stage = n_block % kStages;
        const TileMask block_mask = tile_mask.from_key(n_block * kBlockN);

        cp_async_wait<kStages - 2>();
        bool nonfinite = false;
        if constexpr (kIsMasked) {
            const auto thr_copy = gmem_tiled_copy.get_thread_slice(thread());
            nonfinite = __syncthreads_or(has_nonfinite(thr_copy.partition_D(sV(_, _, stage))));
        } else {
            __syncthreads();
        }
        if (n_block - (kStages - 1) >= n_block_begin) {
            // Only the last block, which the prologue has loaded, may end early.
            load_kv(n_block - (kStages - 1), Int<kBlockN>{});
        }
        cp_async_fence();

        // A warp none of whose rows sees the block has nothing to do in it; nor has its partner.
        const int first_row = thread() / 32 / kWarpsN * Traits::kWarpM;
        if (!kIsMasked || nonfinite ||
            (block_mask.key_end(first_row + Traits::kWarpM - 1) > 0 &&
             block_mask.key_begin(first_row) < kBlockN)) {
            Tensor acc_s = partition_fragment_C(tiled_mma, TileS{});  // (MMA=4, MMA_M, MMA_N)
            Tensor s = rows_and_cols(acc_s);                          // (2 * MMA_M, 2 * MMA_N)
            clear(acc_s);
            if constexpr (Traits::kQInRegisters) {
                warp_gemm(tiled_mma, smem_copy_k, acc_s, tSrQ, sK(_, _, stage), thread(),
                          InRegisters{});
            } else {
                warp_gemm(tiled_mma, smem_copy_k, acc_s, tSrQ, sK(_, _, stage), thread(),
                          a_loader(thread(), sQ, tSrQ));
            }
            const auto thr_mma = tiled_mma.get_thread_slice(thread());
            Tensor s_coord = rows_and_cols(thr_mma.partition_C(cS));
            // Pairs read the index for P V before they wait for each other, not after.
            const auto thread_pv = [&] {
                if constexpr (kWarpsN == 1) {
                    return thread;
                } else {
                    return [index = thread()] { return index; };
                }
            }();
            if constexpr (kHasExtras) finish_logits(s, s_coord, n_block, is_masked);
            if constexpr (kIsMasked) mask_logits(s, s_coord, block_mask);
            Tensor rP = weights_of(acc_s, s_coord, is_masked, thread_pv);
            if (kIsMasked && nonfinite) {
                const auto sees = [&](int row, int key) {
                    if (key < block_mask.key_begin(row) || key >= block_mask.key_end(row)) {
                        return false;
                    }
                    if constexpr (kHasExtras) {
                        const TileIndex here = tile_index(reread_block_index());
                        const BiasMask bias_mask(problem, tensors, here.batch, here.head);
                        const int query = here.m_begin + row;
                        return query < seqlen_q && !bias_mask.hides(query, n_block * kBlockN + key);
                    }
                    return true;
                };
                add_nonfinite(o, sV(_, _, stage), rows_and_cols(thr_mma.partition_C(cQ)), sees);
                __syncthreads();
                const auto thr_copy = gmem_tiled_copy.get_thread_slice(thread());
                clear_nonfinite(thr_copy.partition_D(sV(_, _, stage)));
                __syncthreads();
            }
            if constexpr (kWarpsN == 1) {
                warp_gemm(tiled_mma, smem_copy_v, acc_o, as_a_operand(rP), sVt(_, _, stage),
                          thread(), InRegisters{});
            } else {
                warp_gemm(tiled_mma, smem_copy_v, acc_o, rP, sVt(_, _, stage), thread_pv(),
                          a_loader(thread_pv(), shared.tile_p(), rP));
            }
        }
    };
    // The caller's mask may hide keys of any block.
    const auto is_full = [&](int n_block) {
        return n_block >= n_block_full_begin && n_block < n_block_full_end &&
               !(kHasExtras && tensors.mask_ptr != nullptr);
    };
    // At most two rounds: the bounds may cut the last blocks and the first.
    CUTE_NO_UNROLL
    for (int n_block = n_block_end - 1; n_block >= n_block_begin;) {
        CUTE_NO_UNROLL
        for (; n_block >= n_block_begin && !is_full(n_block); --n_block) step(n_block, true_type{});
        CUTE_NO_UNROLL
        for (; is_full(n_block); --n_block) step(n_block, false_type{});
    }

    // ---- Epilogue: O / l and lse; O through the memory of Q, to leave in whole rows ----
    const TileIndex out = tile_index(reread_block_index());
    const auto thr_mma = tiled_mma.get_thread_slice(thread());
    Tensor o_coord = rows_and_cols(thr_mma.partition_C(cQ));  // (2 * MMA_M, 2 * MMA_K)
    softmax.finish();
    if constexpr (kWarpsN == 2) {
        float other_sum[kRows];
        pair_exchange(thread() / 32, softmax.row_sum, other_sum, shared.row_values, o_coord);
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) softmax.row_sum[r] += other_sum[r];
    }
    CUTE_UNROLL
    for (int r = 0; r < size<0>(o); ++r) {
        const int row = out.m_begin + get<0>(o_coord(r, 0));
        const float inverse = inverse_row_sum(softmax.row_sum[r]);
        CUTE_UNROLL
        for (int c = 0; c < size<1>(o); ++c) o(r, c) *= inverse;
        if (tensors.lse_ptr != nullptr && get<1>(o_coord(r, 0)) == 0 && row < seqlen_q) {
            tensors.lse_ptr[out.batch_head * problem.seqlen_q + row] =
                log_sum_exp(softmax.row_max[r], softmax.row_sum[r]);
        }
    }
    // A warp writes and reads only its own rows of sQ up to here, and its partner has read them.
    Tensor rO = round_to<Element>(acc_o);  // (MMA=4, MMA_M, MMA_K)
    const auto smem_thr_copy_c = smem_copy_c.get_thread_slice(thread());
    copy(smem_copy_c, smem_thr_copy_c.retile_S(rO), smem_thr_copy_c.partition_D(sQ));
    __syncthreads();
    auto* o_ptr = static_cast<Element*>(tensors.o_ptr) + out.batch * tensors.o_batch_stride +
                  out.head * tensors.o_head_stride;
    Tensor gO = gmem_tile<TileQ>(o_ptr, tensors.o_row_stride, out.m_begin);  // (BlockM, HeadDim)
    const auto thr_copy = gmem_tiled_copy.get_thread_slice(thread());
    store_tile(thr_copy.partition_S(sQ), thr_copy.partition_D(gO), thr_copy.partition_S(cQ),
               seqlen_q - out.m_begin, head_dim_v, aligned16);
}

}  // namespace fa101
