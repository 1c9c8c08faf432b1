// Lesson 3 on Turing: FlashAttention-2 on tensor cores, float16, for a GPU that has ldmatrix and
// mma.sync but no cp.async, and 64 KB of shared memory a multiprocessor.
//
// A block owns 64 queries of one head, each of its 4 warps 16 of them, in registers for the whole
// loop. K and V pass through shared memory a block at a time, by way of registers:
//
//     barrier: the last block is used up      K, V (n): global -> registers -> shared
//     barrier: K and V (n) are there          S = Q K^T     softmax     O += P V
//
// Nothing overlaps within a block of threads. What hides the loads is that several blocks share a
// multiprocessor, which is why tiles are small.
//
// Registers of a thread at head_dim 128: O 16 x 128 / 32 = 64, Q 32, S 16; at head_dim 256 O 128, Q
// 64, S 16. Global traffic: 4 * head_dim bytes a key against 4 * head_dim * 64 FLOP, so 64 FLOP a
// byte, mostly from L2. Shared: an ldmatrix.x4 brings 512 bytes, 4 to 8 cycles, and feeds 4 mma, 8
// cycles of a T4's multiprocessor (1024 FLOP a cycle): both are near their limits. Warps of 32 rows
// would need half the bytes, and twice the registers.
//
// Not-a-numbers. A hidden key has weight 0, but 0 * NaN = NaN. It turns up in O. So the loop first
// runs as if all were finite; if a NaN or inf comes out, hardly ever, the block runs it again with
// the NaNs and infs of V taken out of the product and added to the rows that see them. All else is
// the same instructions, so that rows without them get the same bits.
//
// Next rung (fa2_cute on sm_80): cp.async, which copies while the warps compute, and an mma twice
// as deep.
//
// Sources: Dao 2023 (arXiv 2307.08691); fragments as in mma.cuh.
#pragma once

#include <fa101/params.h>

#include "common/bias_mask.h"
#include "common/mask.h"
#include "common/memory.cuh"
#include "common/mma_tile.cuh"
#include "common/online_softmax.h"
#include "common/packed.cuh"
#include "common/warp.cuh"
#include "flash_attn_sm75/mma.cuh"
#include "flash_attn_sm75/tile_config.h"

#include <cuda_fp16.h>

#include <cstdint>

namespace fa101::sm75 {

// Eight consecutive elements; zeros past `count`, which are not read. `aligned16` is
// Problem::aligned16: a vector is there whole or not at all.
__device__ __forceinline__ uint4 load8(const __half* src, int count, bool aligned16) {
    union {
        uint4 vector;
        uint16_t element[8];
    } x = {};
    if (aligned16) {
        if (count > 0) x.vector = __ldg(reinterpret_cast<const uint4*>(src));
    } else {
        const auto* const elements = reinterpret_cast<const uint16_t*>(src);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < count) x.element[i] = __ldg(elements + i);
        }
    }
    return x.vector;
}

// Copies rows [first_row, first_row + kRows) of kCols halves into shared rows kStride apart, all
// threads of the block together; rows from num_rows and columns from num_cols on become zeros and
// are not read. Four loads are in flight before the first store.
template <int kRows, int kCols, int kStride, int kNThreads>
__device__ __forceinline__ void copy_rows(__half* dst, const __half* src, int64_t row_stride,
                                          int first_row, int num_rows, int num_cols,
                                          bool aligned16) {
    constexpr int kRowsAtOnce = 8 * kNThreads / kCols, kBatch = 4;
    static_assert(kRows % (kRowsAtOnce * kBatch) == 0, "every thread copies as much");
    const int thread = reread_thread_index<kNThreads>();
    asm volatile("" : "+l"(row_stride));  // its multiples are not kept in registers either
    const int row_of_thread = thread / (kCols / 8), col = thread % (kCols / 8) * 8;
    dst += row_of_thread * kStride + col;
    src += (first_row + row_of_thread) * row_stride + col;
    num_rows -= first_row + row_of_thread;  // those that exist, from this thread's first on
#pragma unroll 1
    for (int row = 0; row < kRows; row += kBatch * kRowsAtOnce) {
        uint4 x[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int r = row + i * kRowsAtOnce;
            x[i] = load8(src + r * row_stride, r < num_rows ? num_cols - col : 0, aligned16);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            *reinterpret_cast<uint4*>(dst + (row + i * kRowsAtOnce) * kStride) = x[i];
        }
    }
}

// kHasExtras: softcap, bias or mask.
template <int kTileIndex, bool kHasExtras>
__global__ void __launch_bounds__(32 * kTiles[kTileIndex].num_warps,
                                  kTiles[kTileIndex].blocks_per_sm)
    fa2_sm75_kernel(const __grid_constant__ Problem problem,
                    const __grid_constant__ Tensors tensors) {
    constexpr TileConfig kTile = kTiles[kTileIndex];
    constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kHeadDim = kTile.head_dim;
    constexpr int kStride = kTile.stride(), kNThreads = 32 * kTile.num_warps;
    constexpr int kWarpM = 16;
    static_assert(kBlockM == kWarpM * kTile.num_warps, "a warp owns one row of mma tiles");
    static_assert(kBlockM <= 2 * kBlockN, "Q passes through the memory of K and V");
    static_assert(kHeadDim % 32 == 0, "one ldmatrix.x4 brings 32 columns");

    // ---- Which tile: those that see most keys first, so that short ones fill the end ----
    const int seqlen_q = static_cast<int>(problem.seqlen_q);
    const int head_dim = static_cast<int>(problem.head_dim);
    const int head_dim_v = static_cast<int>(problem.head_dim_v);
    const int num_heads = static_cast<int>(problem.num_heads);
    const int num_m_blocks = ceil_div(seqlen_q, kBlockM);
    const int m_block = num_m_blocks - 1 - static_cast<int>(blockIdx.x) % num_m_blocks;
    const int batch_head = static_cast<int>(blockIdx.x) / num_m_blocks;
    const int bidb = batch_head / num_heads, bidh = batch_head % num_heads;
    const int m_begin = m_block * kBlockM, num_rows = min(kBlockM, seqlen_q - m_begin);
    const int bidh_kv = bidh / (num_heads / static_cast<int>(problem.num_heads_kv));
    const auto make_bias_mask = [&] { return BiasMask(problem, tensors, bidb, bidh); };

    const Mask mask = mask_of(problem, tensors, bidb);
    const TileMask tile_mask = mask.tile(m_begin, kBlockM);
    const int n_block_begin = mask.n_block_begin(m_begin, kBlockN);
    const int n_block_end = mask.n_block_end(m_begin + num_rows, kBlockN);

    // ---- Shared memory, and who works on what of it ----
    extern __shared__ __align__(16) __half smem[];
    __half* const sQ = smem;                                 // (BlockM, stride), at the start
    __half* const sK = smem;                                 // (BlockN, stride)
    __half* const sV = smem + kBlockN * kStride;             // (BlockN, stride)
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler: one for a warp
    const int warp_row = warp * kWarpM;
    const auto get_lane = [] { return reread_thread_index<kNThreads>() % 32; };

    // ---- Q, once ----
    copy_rows<kBlockM, kHeadDim, kStride, kNThreads>(
        sQ,
        mma::head_ptr<__half>(tensors.q_ptr, tensors.q_batch_stride, tensors.q_head_stride, bidb,
                              bidh),
        tensors.q_row_stride, m_begin, seqlen_q, head_dim, problem.aligned16);
    __syncthreads();
    uint32_t q[kHeadDim / 16][4];  // the A operands of two k-steps each
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
        const int lane = get_lane();
        ldmatrix_x4(q[k], sQ + (warp_row + lane % 16) * kStride + 16 * k + lane / 16 * 8);
    }

    mma::Tile<1, kHeadDim / 8> o;
    mma::OnlineSoftmax<1> softmax;

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

        __syncthreads();
        copy_rows<kBlockN, kHeadDim, kStride, kNThreads>(
            sK,
            mma::head_ptr<__half>(tensors.k_ptr, tensors.k_batch_stride, tensors.k_head_stride,
                                  bidb, bidh_kv),
            tensors.k_row_stride, n_begin, tile_mask.num_keys, head_dim, problem.aligned16);
        copy_rows<kBlockN, kHeadDim, kStride, kNThreads>(
            sV,
            mma::head_ptr<__half>(tensors.v_ptr, tensors.v_batch_stride, tensors.v_head_stride,
                                  bidb, bidh_kv),
            tensors.v_row_stride, n_begin, tile_mask.num_keys, head_dim_v, problem.aligned16);
        __syncthreads();

        mma::Tile<1, kBlockN / 8> s = {};
        if (is_seen) {
            const int lane = get_lane();
            const __half* const k_lane = sK + lane % 8 * kStride + lane / 8 * 8;
#pragma unroll
            for (int d = 0; d < kHeadDim; d += 32) {
                if (d >= head_dim) break;  // nothing to do in the padding
#pragma unroll
                for (int n = 0; n < kBlockN / 8; ++n) {
                    uint32_t k[4];
                    ldmatrix_x4(k, k_lane + 8 * n * kStride + d);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t* const a = q[d / 16 + i / 2] + i % 2 * 2;
                        mma_m16n8k8(s[0][n], a[0], a[1], k[i]);
                    }
                }
            }
            mma::finish_logits<kHasExtras>(
                s, problem, place(lane), is_masked, make_bias_mask,
                [&](const void* x) { return to_float(x, problem.dtype_bias); });
            softmax.step(s, o);
        }

        if (careful) {
            if (is_seen) {
                const int lane = get_lane();
                const BiasMask bias_mask = make_bias_mask();
                const auto v_of = [&](int key, int n, int i) {
                    return to_float(sV[key * kStride + lane % 4 * 2 + mma::col_of(n, i)]);
                };
                mma::add_nonfinite(o, kBlockN, v_of, [&](int m, int i, int key) {
                    return place(lane).sees(bias_mask, m, i, key);
                });
            }
            __syncthreads();
            for (int i = threadIdx.x; i < kBlockN * kStride; i += kNThreads) {
                if (!mma::is_finite(to_float(sV[i]))) sV[i] = __half(0.0f);
            }
            __syncthreads();
        }

        if (is_seen) {
            const int lane = get_lane();
            const __half* const v_lane = sV + lane % 8 * kStride + lane / 8 * 8;
#pragma unroll
            for (int t = 0; t < kBlockN / 8; ++t) {
                const uint32_t p0 = pack<__half>(s[0][t][0], s[0][t][1]);
                const uint32_t p1 = pack<__half>(s[0][t][2], s[0][t][3]);
#pragma unroll
                for (int d = 0; d < kHeadDim; d += 32) {
                    if (d >= head_dim_v) break;
                    uint32_t v[4];
                    ldmatrix_x4_transposed(v, v_lane + 8 * t * kStride + d);
#pragma unroll
                    for (int i = 0; i < 4; ++i) mma_m16n8k8(o[0][d / 8 + i], p0, p1, v[i]);
                }
            }
        }
    };

#pragma unroll 1
    for (bool careful = false;; careful = true) {
        softmax.reset();
        mma::for_each(o, [](float& x, int, int, int) { x = 0.0f; });
#pragma unroll 1
        for (int n_block = n_block_begin; n_block < n_block_end; ++n_block) step(n_block, careful);
        if (careful || !__syncthreads_or(softmax.has_nonfinite(o))) break;
    }

    // ---- O / l and lse ----
    const int lane = get_lane();
    auto* const o_ptr = static_cast<__half*>(tensors.o_ptr) + bidb * tensors.o_batch_stride +
                        bidh * tensors.o_head_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = m_begin + warp_row + lane / 4 + mma::row_of(0, 2 * i);
        const float sum = quad_sum(softmax.row_sum[0][i]);
        const float inverse = inverse_row_sum(sum);
        if (row >= seqlen_q) continue;
        if (tensors.lse_ptr != nullptr && lane % 4 == 0) {
            tensors.lse_ptr[int64_t{batch_head} * seqlen_q + row] =
                log_sum_exp(softmax.row_max[0][i], sum);
        }
        __half* const o_row = o_ptr + row * tensors.o_row_stride;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            const int col = lane % 4 * 2 + mma::col_of(n, 0);
            const uint32_t pair =
                pack<__half>(o[0][n][2 * i] * inverse, o[0][n][2 * i + 1] * inverse);
            if (problem.aligned16) {
                if (col < head_dim_v) *reinterpret_cast<uint32_t*>(o_row + col) = pair;
            } else {
                const __half2 halves = *reinterpret_cast<const __half2*>(&pair);
                if (col < head_dim_v) o_row[col] = halves.x;
                if (col + 1 < head_dim_v) o_row[col + 1] = halves.y;
            }
        }
    }
}

}  // namespace fa101::sm75
