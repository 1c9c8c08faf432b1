// Lesson 3 for float32: FlashAttention-2 on tensor cores at float32's precision. Tensor cores
// multiply TF32, 11 significant bits, so each product is made of three (mma.cuh). On an H200 that
// leaves 494 / 3 = 165 TFLOP/s by specification, CUDA cores have 67. No CuTe here: both tricks with
// fragments below are one line as index arithmetic.
//
// A block owns kBlockM queries of one head, each warp kWarpM consecutive rows of them, 32 where
// registers allow: what a warp loads and splits of K and V then serves two mma tiles. One block of
// K and one of V are in shared memory, and each is copied while the other is used:
//
//     barrier: K(n) is there, V(n-1) is used up     cp.async V(n)      S = Q K^T, softmax
//     barrier: V(n) is there, K(n) is used up       cp.async K(n+1)    O += P V
//
// So the memory of one stage does for the pipeline of two, and two blocks fit a multiprocessor.
//
// Fragments. ldmatrix moves 16-byte rows and does not ask what is in them: Q and K come by it. It
// cannot transpose 32-bit values, but nothing has to be transposed: the sum over keys may take them
// in any order, so k-slots q and q+4 of an mma stand for keys 2q and 2q+1, which is where the
// accumulator of S has its columns, and P stays in its registers. V is read 8 bytes at a time, two
// columns for two mma tiles: n-slot g of tile i stands for column 2g+i. Then a lane's 4 values of O
// from two tiles are 4 neighbours in memory, and leave as one 16-byte store.
//
// What limits. Instructions beside each 16 x 8 x 8 mma, with 32 rows a warp (with 16 in brackets):
// splitting K and V 1 (2), adding sums 2/3, loads 1/8 (1/4), softmax and splitting Q and P about 1:
// together 3 (4). The mma keeps a scheduler's tensor core busy for 4 cycles by sm_90's
// specification, so tensor cores and issue slots are about equally loaded, as long as the two warps
// of a scheduler cover each other's waits.
// Registers at 128 x 64, head_dim 64: O 64, S 64, Q split 32, K split 8, sums 8; at head_dim 128 O
// 128 and S 32. Global traffic is lesson 3's, in values twice as large.
//
// Not-a-numbers. A hidden key has weight 0, but 0 * NaN = NaN; and splitting inf gives inf - inf =
// NaN. Both turn up in O or l. So the loop first runs as if all were finite. If a NaN or inf comes
// out, hardly ever, the block runs it again with care: NaN logits are summed anew by FFMA, and the
// NaNs and infs of V are taken out of the product and added to the rows that see them. All else is
// the same instructions, so that rows without them get the same bits.
//
// A next rung would be wgmma. It reads operands from shared memory, so big and small would have to
// be stored there, in twice the bytes.
//
// Sources: Dao 2023 (arXiv 2307.08691); the split as in mma.cuh.
#pragma once

#include <fa101/params.h>

#include "common/bias_mask.h"
#include "common/mask.h"
#include "common/memory.cuh"
#include "common/mma_tile.cuh"
#include "common/online_softmax.h"
#include "common/warp.cuh"
#include "flash_attn_tf32/mma.cuh"
#include "flash_attn_tf32/tile_config.h"
#include "flash_attn_tf32/tiles.cuh"

#include <cstdint>

namespace fa101::tf32 {

// kHasExtras: softcap, bias or mask.
template <int kTileIndex, bool kHasExtras>
__global__ void __launch_bounds__(32 * kTiles[kTileIndex].num_warps,
                                  kTiles[kTileIndex].blocks_per_sm)
    fa2_tf32_kernel(const __grid_constant__ Problem problem,
                    const __grid_constant__ Tensors tensors) {
    constexpr TileConfig kTile = kTiles[kTileIndex];
    constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kHeadDim = kTile.head_dim;
    constexpr int kStride = kTile.stride(), kNThreads = 32 * kTile.num_warps;
    constexpr int kWarpM = kBlockM / kTile.num_warps, kM = kWarpM / 16;
    constexpr int kDepth = 8 * kSteps;  // columns of Q and K, or keys of P and V, of one sum
    static_assert(kDepth == 16, "one ldmatrix.x4 brings 16 columns of K");
    static_assert(kWarpM % 16 == 0 && kBlockN % 16 == 0 && kHeadDim % 16 == 0, "whole mma tiles");

    // ---- Which tile: those that see most keys first, so that short ones fill the end ----
    const int seqlen_q = static_cast<int>(problem.seqlen_q);
    const int head_dim = static_cast<int>(problem.head_dim);
    const int head_dim_v = static_cast<int>(problem.head_dim_v);
    const int num_heads = static_cast<int>(problem.num_heads);
    struct TileIndex {
        int m_begin, batch_head;
    };
    const auto tile_index = [&](int block) -> TileIndex {
        const int num_m_blocks = ceil_div(seqlen_q, kBlockM);
        return {(num_m_blocks - 1 - block % num_m_blocks) * kBlockM, block / num_m_blocks};
    };
    const TileIndex tile = tile_index(blockIdx.x);
    const int m_begin = tile.m_begin;
    const int num_rows = min(kBlockM, seqlen_q - m_begin);
    const int bidb = tile.batch_head / num_heads, bidh = tile.batch_head % num_heads;
    const int bidh_kv = bidh / (num_heads / static_cast<int>(problem.num_heads_kv));
    // Made where it is needed, not kept in registers.
    const auto make_bias_mask = [&] {
        const int batch_head = tile_index(reread_block_index()).batch_head;
        return BiasMask(problem, tensors, batch_head / num_heads, batch_head % num_heads);
    };

    const Mask mask = mask_of(problem, tensors, bidb);
    const TileMask tile_mask = mask.tile(m_begin, kBlockM);
    const int n_block_begin = mask.n_block_begin(m_begin, kBlockN);
    const int n_block_end = mask.n_block_end(m_begin + num_rows, kBlockN);

    // ---- Shared memory, and who works on what of it ----
    extern __shared__ __align__(16) float shared[];
    float* const sQ = shared;                                // (BlockM, stride)
    float* const sK = sQ + kBlockM * kStride;                // (BlockN, stride)
    float* const sV = sK + kBlockN * kStride;                // (BlockN, stride)
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler: one for a warp
    const int warp_row = warp * kWarpM;
    const auto get_lane = [] { return reread_thread_index<kNThreads>() % 32; };

    const auto copy_k = [&](int n_block) {
        const int n_begin = n_block * kBlockN;
        const auto* const k_ptr = mma::head_ptr<float>(tensors.k_ptr, tensors.k_batch_stride,
                                                       tensors.k_head_stride, bidb, bidh_kv);
        copy_rows<kBlockN, kHeadDim, kStride, kNThreads>(
            reread_thread_index<kNThreads>(), sK, k_ptr, tensors.k_row_stride, n_begin,
            tile_mask.num_keys, head_dim, problem.aligned16);
    };
    const auto copy_v = [&](int n_block) {
        const int n_begin = n_block * kBlockN;
        const auto* const v_ptr = mma::head_ptr<float>(tensors.v_ptr, tensors.v_batch_stride,
                                                       tensors.v_head_stride, bidb, bidh_kv);
        copy_rows<kBlockN, kHeadDim, kStride, kNThreads>(
            reread_thread_index<kNThreads>(), sV, v_ptr, tensors.v_row_stride, n_begin,
            tile_mask.num_keys, head_dim_v, problem.aligned16);
    };

    mma::Tile<kM, kHeadDim / 8> o;
    mma::OnlineSoftmax<kM> softmax;
    using Logits = mma::Tile<kM, kBlockN / 8>;

    const auto step = [&](int n_block, bool careful) {
        const int n_begin = n_block * kBlockN;
        const TileMask block_mask = tile_mask.from_key(n_begin);
        const bool is_masked =
            block_mask.key_begin(num_rows - 1) > 0 || block_mask.key_end(0) < kBlockN;
        const auto place = [&](int lane) -> mma::LogitsPlace {
            return {block_mask, m_begin, num_rows, n_begin, warp_row + lane / 4, lane % 4 * 2};
        };
        // A warp none of whose rows sees the block has nothing to do in it.
        const bool is_seen =
            warp_row < num_rows &&
            (!is_masked || (block_mask.key_begin(warp_row) < kBlockN &&
                            block_mask.key_end(min(warp_row + kWarpM, num_rows) - 1) > 0));

        cp_async_wait();
        __syncthreads();
        copy_v(n_block);

        // ---- S = Q K^T, and P ----
        Logits s = {};
        if (is_seen) {
            const int lane = get_lane();
            const float* const q_lane = sQ + (warp_row + lane % 16) * kStride + lane / 16 * 4;
            const float* const k_lane = sK + lane % 8 * kStride + lane / 8 * 4;
#pragma unroll 1
            for (int d = 0; d < head_dim; d += kDepth) {
                Split<4> q[kM][kSteps];
                load_rows<kStride>(q, q_lane + d);
#pragma unroll
                for (int n = 0; n < kBlockN / 8; ++n) {
                    Split<2> k[1][kSteps];
                    load_k<kStride>(k, k_lane + 8 * n * kStride + d);
                    multiply_add(s, 0, n, q, k);
                }
            }
            if (careful) replace_nans<kStride>(s, sQ + warp_row * kStride, sK, head_dim, lane);
            mma::finish_logits<kHasExtras>(
                s, problem, place(get_lane()), is_masked, make_bias_mask,
                [](const void* x) { return *static_cast<const float*>(x); });
            softmax.step(s, o);
        }

        cp_async_wait();
        __syncthreads();
        if (n_block + 1 < n_block_end) copy_k(n_block + 1);

        if (careful) {
            if (is_seen) {
                const int lane = get_lane();
                const BiasMask bias_mask = make_bias_mask();
                mma::add_nonfinite(
                    o, kBlockN,
                    [&](int key, int n, int i) { return sV[key * kStride + o_col(lane, n, i)]; },
                    [&](int m, int i, int key) { return place(lane).sees(bias_mask, m, i, key); });
            }
            __syncthreads();
            make_splittable<kNThreads>(sV, kBlockN * kStride, threadIdx.x);
            __syncthreads();
        }

        // ---- O += P V ----
        if (is_seen) {
            const int lane = get_lane();
            const float* const v_lane = sV + lane % 4 * 2 * kStride + lane / 4 * 2;
#pragma unroll
            for (int t = 0; t < kBlockN / kDepth; ++t) {
                Split<4> p[kM][kSteps];
                split_weights(p, s, t * kSteps);
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; n += 2) {
                    // Nothing to do in the padding. The branch has a second use: ptxas finishes the
                    // sums before it, where else it would keep many of them for later, and spill.
                    if (8 * n >= head_dim_v) break;
                    Split<2> v[2][kSteps];
                    load_v<kStride>(v, v_lane + kDepth * t * kStride + 8 * n);
                    multiply_add(o, 0, n, p, v);
                }
            }
        }
    };

    const auto* const q_ptr = mma::head_ptr<float>(tensors.q_ptr, tensors.q_batch_stride,
                                                   tensors.q_head_stride, bidb, bidh);
    copy_rows<kBlockM, kHeadDim, kStride, kNThreads>(reread_thread_index<kNThreads>(), sQ, q_ptr,
                                                     tensors.q_row_stride, m_begin, seqlen_q,
                                                     head_dim, problem.aligned16);
#pragma unroll 1
    for (bool careful = false;; careful = true) {
        softmax.reset();
        mma::for_each(o, [](float& x, int, int, int) { x = 0.0f; });
        if (n_block_begin < n_block_end) copy_k(n_block_begin);
#pragma unroll 1
        for (int n_block = n_block_begin; n_block < n_block_end; ++n_block) step(n_block, careful);

        if (careful || !__syncthreads_or(softmax.has_nonfinite(o))) break;
    }

    // ---- O / l and lse; the tile's place is worked out anew instead of kept over the loop ----
    const int lane = get_lane();
    const TileIndex out = tile_index(reread_block_index());
    float* const o_ptr = Head<float>(problem, tensors, out.batch_head).o;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = out.m_begin + warp_row + lane / 4 + mma::row_of(m, 2 * i);
            const float sum = quad_sum(softmax.row_sum[m][i]);
            const float inverse = inverse_row_sum(sum);
            if (row >= seqlen_q) continue;
            if (tensors.lse_ptr != nullptr && lane % 4 == 0) {
                tensors.lse_ptr[int64_t{out.batch_head} * seqlen_q + row] =
                    log_sum_exp(softmax.row_max[m][i], sum);
            }
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; n += 2) {
                const Float4 values = {o[m][n][2 * i] * inverse, o[m][n + 1][2 * i] * inverse,
                                       o[m][n][2 * i + 1] * inverse,
                                       o[m][n + 1][2 * i + 1] * inverse};
                const int col = o_col(lane, n, 0);
                store4(o_ptr + row * tensors.o_row_stride + col, values, head_dim_v - col,
                       problem.aligned16);
            }
        }
    }
}

}  // namespace fa101::tf32
