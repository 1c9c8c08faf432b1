// Lesson 3 for float32, where a row is too long for a warp: head_dim 257 to 1024 by three TF32
// products for one (flash_attn_tf32). As in flash_attn_split_d, O of a tile of queries fills the
// registers of eight warps; here each warp has the same slice of head_dim, an eighth, in
// everything:
//
//   S = Q K^T   a warp multiplies its slice of Q by its slice of K: partial logits of all queries
//   exchange    it leaves them in shared memory, where its K was; barrier
//   softmax     a warp adds up the eight parts of an eighth of the rows, and has their m and l to
//               itself: no maximum to agree on. It leaves P, and by how much O follows; barrier
//   O = P V     a warp multiplies all of P by its slice of V: its slice of O
//
// So no two warps read the same of Q, K or V, and each copies what it reads: pieces of K and V come
// as a chain through the warp's slots in shared memory, without a barrier of the block; and every
// value of K and V is split into its two TF32 once, or twice with 64 queries.
//
// Instructions of a warp and step, 16 keys, at head_dim 512 with 64 queries (at 1024 with 32):
//                      Q K^T                  P V
//     mma              192 (192)              192 (192)
//     splitting        Q 384, K 96 (384, 192) P 96, V 192 (96, 192)
//     adding sums      128 (128)              128 (128)
//     loads             40  (48)               40  (40)
// and some 80 for exchange and softmax: 1570 (1670) with 384 mma, so that two warps keep a
// scheduler busy for 3100 cycles a step where its tensor core needs 3072 by sm_90's specification.
//
// Registers at head_dim 512, 64 queries: O 64 x 64 / 32 lanes = 128, S 32, fragments of Q 32 and K
// 16, or P 32 and V 16, sums 16. At 1024 with 32 queries O is 128 and S 16.
//
// Shared memory, bytes:                  head_dim 512, 64 queries     1024, 32 queries
//     Q                                        136 K                      132 K
//     two slots                                 68 K                       68 K (half a slice each)
//     P, rows                                    5 K                        3 K
//     together                                 209 K                      203 K   of 227 K a block
// Its traffic a step at 512, in cycles of 128 bytes: Q 1024, K 256, V 512, P 256, cp.async 512, the
// exchange 512: 3072, as much as the products take. Global memory: K and V once per query tile,
// kBlockM / 2 FLOP a byte: 80 TFLOP/s ask L2 for 2.5 TB/s with 64 queries.
//
// Few query tiles leave multiprocessors idle; then the keys are split over blocks too, as in
// flash_decode, and its combine.cu merges the parts.
//
// Not-a-numbers as in flash_attn_tf32: if one comes out, the block runs again with care.
#pragma once

#include <fa101/params.h>

#include "common/bias_mask.h"
#include "common/mask.h"
#include "common/memory.cuh"
#include "common/mma_tile.cuh"
#include "common/online_softmax.h"
#include "common/warp.cuh"
#include "flash_attn_split_d_tf32/family.h"
#include "flash_attn_split_d_tf32/tile_config.h"
#include "flash_attn_tf32/mma.cuh"
#include "flash_attn_tf32/tiles.cuh"

#include <cstdint>

namespace fa101::split_d_tf32 {

template <int kTileIndex>
__global__ void __launch_bounds__(32 * kNumWarps, kTiles[kTileIndex].blocks_per_sm())
    split_d_tf32_kernel(const __grid_constant__ Problem problem,
                        const __grid_constant__ Tensors tensors,
                        const __grid_constant__ Partials partials) {
    constexpr TileConfig kTile = kTiles[kTileIndex];
    constexpr int kBlockM = kTile.block_m, kM = kBlockM / 16, kSlots = kTile.slots;
    constexpr int kSlice = kTile.slice(), kPiece = kTile.piece, kPieces = kSlice / kPiece;
    constexpr int kStride = kTile.stride(), kQStride = kTile.q_stride();
    constexpr int kWeightsStride = kTile.weights_stride(), kSlotFloats = kTile.slot_floats();
    constexpr int kNThreads = 32 * kNumWarps;
    constexpr int kDepth = 8 * tf32::kSteps;  // columns of Q and K, or keys of P and V, of one sum
    constexpr int kChain = 2 * kPieces;       // pieces of a block of keys: those of K, then of V
    constexpr int kTogether = kM < 2 ? kM : 2;      // row tiles of queries worked on at a time
    constexpr int kRowLanes = kNThreads / kBlockM;  // lanes that share a row in the softmax
    constexpr int kRowKeys = kBlockN / kRowLanes;   // keys of each
    static_assert(kBlockN == kDepth, "a step is one sum deep");
    static_assert(kBlockM % 16 == 0 && kSlice % kPiece == 0 && kPiece % 16 == 0, "whole mma tiles");

    // ---- Which tile: those that see most keys first, so that short ones fill the end ----
    const int seqlen_q = static_cast<int>(problem.seqlen_q);
    const int head_dim = static_cast<int>(problem.head_dim);
    const int head_dim_v = static_cast<int>(problem.head_dim_v);
    const int num_heads = static_cast<int>(problem.num_heads);
    struct TileIndex {
        int m_begin, split, batch_head, bidb, bidh;
    };
    const auto tile_index = [&](int block) -> TileIndex {
        const int num_m_blocks = ceil_div(seqlen_q, kBlockM);
        const int m_block = num_m_blocks - 1 - block % num_m_blocks;
        const int num_batch_heads = static_cast<int>(problem.batch) * num_heads;
        const int split = block / num_m_blocks / num_batch_heads;
        const int batch_head = block / num_m_blocks % num_batch_heads;
        return {m_block * kBlockM, split, batch_head, batch_head / num_heads,
                batch_head % num_heads};
    };
    const TileIndex tile = tile_index(blockIdx.x);
    const int m_begin = tile.m_begin, bidb = tile.bidb;
    const int num_rows = min(kBlockM, seqlen_q - m_begin);
    const int bidh_kv = tile.bidh / (num_heads / static_cast<int>(problem.num_heads_kv));

    const Mask mask = mask_of(problem, tensors, bidb);
    const TileMask tile_mask = mask.tile(m_begin, kBlockM);
    const KeyRange tile_keys = {mask.key_begin(m_begin), mask.key_end(m_begin + num_rows - 1)};
    const KeyRange keys =
        keys_of_split(tile_keys, tile.split, partials.keys.count(tile_keys, kBlockN), kBlockN);
    const int n_begin = keys.begin, n_end = keys.end;
    const int n_block_begin = n_begin / kBlockN;
    const int n_block_end = n_begin < n_end ? ceil_div(n_end, kBlockN) : n_block_begin;

    // Row r of the tile, as lse counts it, of this block's split.
    const auto part_of = [&](const TileIndex& at, int row) {
        return (int64_t{at.batch_head} * seqlen_q + at.m_begin + row) * partials.num_splits +
               at.split;
    };
    if (n_begin >= n_end && partials.num_splits > 1) {
        const int row = threadIdx.x;
        if (row < num_rows) partials.lse[part_of(tile, row)] = -INFINITY;
        return;
    }

    // ---- Shared memory, and the copies into it ----
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler: one for a warp
    const auto get_lane = [] { return reread_thread_index<kNThreads>() % 32; };
    extern __shared__ __align__(16) float shared[];
    float* const all_slots = shared;                                    // [warp][slot]
    float* const all_q = all_slots + kNumWarps * kSlots * kSlotFloats;  // [warp]
    float* const sP = all_q + kNumWarps * kBlockM * kQStride;           // (BlockM, stride)
    float* const sRow = sP + kBlockM * kWeightsStride;                  // [BlockM]
    float* const sQ = all_q + warp * kBlockM * kQStride;                // (BlockM, stride)
    const auto slot = [&](int of_warp, int i) {                         // (BlockN, stride)
        return all_slots + (of_warp * kSlots + i % kSlots) * kSlotFloats;
    };

    // Piece i of the warp's chain. Past its end they are empty, so that groups of cp.async count
    // pieces. Keys from n_end on become zeros.
    const int first_col = warp * kSlice;
    const auto load = [&](int i) {
        const int n_block = n_block_begin + i / kChain;
        if (n_block < n_block_end) {
            const bool is_v = i % kChain >= kPieces;
            const int col = first_col + i % kPieces * kPiece;
            const float* const ptr =
                is_v ? mma::head_ptr<float>(tensors.v_ptr, tensors.v_batch_stride,
                                            tensors.v_head_stride, bidb, bidh_kv)
                     : mma::head_ptr<float>(tensors.k_ptr, tensors.k_batch_stride,
                                            tensors.k_head_stride, bidb, bidh_kv);
            tf32::copy_rows<kBlockN, kPiece, kStride, 32>(
                get_lane(), slot(warp, i), ptr + col,
                is_v ? tensors.v_row_stride : tensors.k_row_stride, n_block * kBlockN, n_end,
                (is_v ? head_dim_v : head_dim) - col, problem.aligned16);
        }
        cp_async_commit();
    };
    const auto load_first = [&] {
#pragma unroll 1
        for (int i = 0; i < kSlots - 1; ++i) load(i);
    };
    // Piece i is there, and the warp is done with the one before: its slot is filled.
    const auto advance_to = [&](int i) {
        cp_async_wait_group<kSlots - 2>();
        __syncwarp();
        load(i + kSlots - 1);
    };

    const auto* const q_ptr = mma::head_ptr<float>(tensors.q_ptr, tensors.q_batch_stride,
                                                   tensors.q_head_stride, bidb, tile.bidh);
    tf32::copy_rows<kBlockM, kSlice, kQStride, 32>(get_lane(), sQ, q_ptr + first_col,
                                                   tensors.q_row_stride, m_begin, seqlen_q,
                                                   head_dim - first_col, problem.aligned16);
    cp_async_commit();
    load_first();

    // Where three products gave NaN, what one gives.
    const auto sum_anew = [&](int row, int key) {
        const float* const q = q_ptr + (m_begin + row) * tensors.q_row_stride;
        const float* const k = mma::head_ptr<float>(tensors.k_ptr, tensors.k_batch_stride,
                                                    tensors.k_head_stride, bidb, bidh_kv) +
                               key * tensors.k_row_stride;
        float sum = 0.0f;
#pragma unroll 1
        for (int d = 0; d < head_dim; ++d) sum += q[d] * k[d];
        return sum;
    };

    // Row r of the partial logits is 16 floats; pieces of 8 change places in every second pair of
    // rows, so that a quad's stores of 8 rows touch all banks.
    const auto logit_offset = [](int row, int key) {
        return row * kBlockN + (key ^ (row / 2 % 2 * 8));
    };
    // In P keys lie as the k-slots of an mma stand for them (flash_attn_tf32/mma.cuh).
    const auto weight_offset = [](int row, int key) {
        return row * kWeightsStride + key / 8 * 8 + key % 2 * 4 + key % 8 / 2;
    };

    // ---- Main loop ----
    mma::Tile<kM, kPiece / 8> o[kPieces] = {};
    float row_max = -INFINITY, row_sum = 0.0f;  // of the lane's row; l over the lane's keys
    const auto step = [&](int n_block, bool careful) {
        const int n_begin = n_block * kBlockN;
        const TileMask block_mask = tile_mask.from_key(n_begin);
        const int chain_begin = (n_block - n_block_begin) * kChain;

        // ---- Partial logits ----
        mma::Tile<kM, kBlockN / 8> s = {};
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            advance_to(chain_begin + piece);
            const int lane = get_lane();
            const float* const q_lane = sQ + lane % 16 * kQStride + lane / 16 * 4 + piece * kPiece;
            const float* const k_lane =
                slot(warp, chain_begin + piece) + lane % 8 * kStride + lane / 8 * 4;
            const int num_cols = head_dim - first_col - piece * kPiece;
#pragma unroll 1
            for (int d = 0; d < min(kPiece, num_cols); d += kDepth) {
                tf32::Split<2> k[kBlockN / 8][tf32::kSteps];
                tf32::load_k<kStride>(k, k_lane + d);
#pragma unroll
                for (int m = 0; m < kM; m += kTogether) {
                    tf32::Split<4> q[kTogether][tf32::kSteps];
                    tf32::load_rows<kQStride>(q, q_lane + 16 * m * kQStride + d);
                    tf32::multiply_add(s, m, 0, q, k);
                }
            }
        }
        const int last_k = chain_begin + kPieces - 1;  // whose slot takes the partial logits
        __syncwarp();
        {
            const int lane = get_lane();
            float* const part = slot(warp, last_k);
#pragma unroll
            for (int m = 0; m < kM; ++m) {
#pragma unroll
                for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        const int row = lane / 4 + mma::row_of(m, i);
                        *reinterpret_cast<float2*>(
                            part + logit_offset(row, lane % 4 * 2 + mma::col_of(n, i))) =
                            make_float2(s[m][n][i], s[m][n][i + 1]);
                    }
                }
            }
        }
        __syncthreads();

        // ---- The softmax of this warp's rows ----
        const int lane = get_lane();
        const int row = warp * (kBlockM / kNumWarps) + lane / kRowLanes;
        const int key = lane % kRowLanes * kRowKeys;
        float x[kRowKeys] = {};
        struct alignas(4 * kRowKeys) Keys {
            float x[kRowKeys];
        };
#pragma unroll
        for (int w = 0; w < kNumWarps; ++w) {
            const Keys part =
                *reinterpret_cast<const Keys*>(slot(w, last_k) + logit_offset(row, key));
#pragma unroll
            for (int k = 0; k < kRowKeys; ++k) x[k] += part.x[k];
        }
        const auto sees = [&](int k) {
            return row < num_rows && block_mask.key_begin(row) <= key + k &&
                   key + k < block_mask.key_end(row);
        };
        if (careful) {
#pragma unroll
            for (int k = 0; k < kRowKeys; ++k) {
                if (sees(k) && x[k] != x[k]) x[k] = sum_anew(row, n_begin + key + k);
            }
        }
        const float scale = problem.softmax_scale, softcap = problem.softcap;
#pragma unroll
        for (int k = 0; k < kRowKeys; ++k) {
            x[k] *= scale;
            if (softcap > 0.0f) x[k] = softcap * tanhf(x[k] / softcap);
            x[k] = sees(k) ? x[k] * kLog2e : -INFINITY;
        }
        if (problem.has_bias || problem.has_mask) {
            const TileIndex at = tile_index(reread_block_index());
            const BiasMask arrays(problem, tensors, at.bidb, at.bidh);
#pragma unroll
            for (int k = 0; k < kRowKeys; ++k) {
                const int64_t query = at.m_begin + row, column = n_begin + key + k;
                if (!sees(k)) continue;
                if (problem.has_bias) {
                    x[k] += base2_bias(*static_cast<const float*>(arrays.bias_at(query, column)));
                }
                if (arrays.hides(query, column)) x[k] = -INFINITY;
            }
        }

        float block_max = -INFINITY, block_sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kRowKeys; ++k) block_max = fmaxf(block_max, x[k]);
#pragma unroll
        for (int bit = 1; bit < kRowLanes; bit *= 2) {
            block_max = fmaxf(block_max, __shfl_xor_sync(~0u, block_max, bit));
        }
        const bool moves = block_max > row_max + mma::OnlineSoftmax<1>::kSlack;
        const float new_max = moves ? block_max : row_max, shift = safe_row_max(new_max);
#pragma unroll
        for (int k = 0; k < kRowKeys; ++k) {
            const float weight = exp2_approx(x[k] - shift);
            sP[weight_offset(row, key + k)] = weight;
            block_sum += weight;
        }
        const float rescale = moves ? exp2_approx(row_max - shift) : 1.0f;
        row_sum = row_sum * rescale + block_sum;
        row_max = new_max;
        if (lane % kRowLanes == 0) sRow[row] = rescale;

        // ---- O += P V ----
        if (__syncthreads_or(moves)) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const float rescale = sRow[get_lane() / 4 + mma::row_of(m, i)];
#pragma unroll
                    for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
                        for (int n = 0; n < kPiece / 8; ++n) {
                            o[piece][m][n][i] *= rescale;
                            o[piece][m][n][i + 1] *= rescale;
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const int i = chain_begin + kPieces + piece;
            advance_to(i);
            const int lane = get_lane();
            float* const sV = slot(warp, i);
            if (careful) {
                const TileIndex at = tile_index(reread_block_index());
                const BiasMask arrays(problem, tensors, at.bidb, at.bidh);
                const mma::LogitsPlace place = {block_mask, m_begin,  num_rows,
                                                n_begin,    lane / 4, 0};
                mma::add_nonfinite(
                    o[piece], kBlockN,
                    [&](int key, int n, int i) {
                        return sV[key * kStride + tf32::o_col(lane, n, i)];
                    },
                    [&](int m, int i, int key) { return place.sees(arrays, m, i, key); });
                __syncwarp();
                tf32::make_splittable<32>(sV, kBlockN * kStride, lane);
                __syncwarp();
            }
            const float* const p_lane = sP + lane % 16 * kWeightsStride + lane / 16 * 4;
            const float* const v_lane = sV + lane % 4 * 2 * kStride + lane / 4 * 2;
            const int num_cols = head_dim_v - first_col - piece * kPiece;
#pragma unroll
            for (int m = 0; m < kM; m += kTogether) {
                tf32::Split<4> p[kTogether][tf32::kSteps];
                tf32::load_rows<kWeightsStride>(p, p_lane + 16 * m * kWeightsStride);
#pragma unroll
                for (int n = 0; n < kPiece / 8; n += 2) {
                    if (8 * n >= num_cols) break;
                    tf32::Split<2> v[2][tf32::kSteps];
                    tf32::load_v<kStride>(v, v_lane + 8 * n);
                    tf32::multiply_add(o[piece], m, n, p, v);
                }
            }
        }
    };
#pragma unroll 1
    for (bool careful = false;; careful = true) {
#pragma unroll 1
        for (int n_block = n_block_begin; n_block < n_block_end; ++n_block) step(n_block, careful);

        if (careful) break;
        float probe = 0.0f * row_sum;  // 0 * x is 0 or, for a NaN or inf, NaN
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            mma::for_each(o[piece], [&](float& x, int, int, int) { probe += 0.0f * x; });
        }
        if (!__syncthreads_or(probe != 0.0f)) break;
        row_max = -INFINITY, row_sum = 0.0f;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            mma::for_each(o[piece], [](float& x, int, int, int) { x = 0.0f; });
        }
        load_first();
    }

    // ---- O / l and lse; the tile's place is worked out anew instead of kept over the loop ----
    const int lane = get_lane();
    const TileIndex out = tile_index(reread_block_index());
    const int rows_left = seqlen_q - out.m_begin;
    {
        const int row = warp * (kBlockM / kNumWarps) + lane / kRowLanes;
#pragma unroll
        for (int bit = 1; bit < kRowLanes; bit *= 2) {
            row_sum += __shfl_xor_sync(~0u, row_sum, bit);
        }
        __syncthreads();  // sRow is used up
        if (lane % kRowLanes == 0) {
            sRow[row] = inverse_row_sum(row_sum);
            if (row < rows_left) {
                if (partials.num_splits > 1) {
                    partials.lse[part_of(out, row)] = row_max + log2f(row_sum);
                } else if (tensors.lse_ptr != nullptr) {
                    tensors.lse_ptr[part_of(out, row)] = log_sum_exp(row_max, row_sum);
                }
            }
        }
        __syncthreads();
    }
    float* const o_ptr = static_cast<float*>(tensors.o_ptr) + out.bidb * tensors.o_batch_stride +
                         out.bidh * tensors.o_head_stride;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const int row = lane / 4 + mma::row_of(m, i);
            const float inverse = sRow[row];
            if (row >= rows_left) continue;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
                for (int n = 0; n < kPiece / 8; n += 2) {
                    Float4 values = {o[piece][m][n][i], o[piece][m][n + 1][i],
                                     o[piece][m][n][i + 1], o[piece][m][n + 1][i + 1]};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        values.x[j] = inverse == 0.0f ? 0.0f : values.x[j] * inverse;
                    }
                    const int col = first_col + piece * kPiece + tf32::o_col(lane, n, 0);
                    if (partials.num_splits == 1) {
                        store4(o_ptr + (out.m_begin + row) * tensors.o_row_stride + col, values,
                               head_dim_v - col, problem.aligned16);
                    } else if (col < head_dim_v) {
                        *reinterpret_cast<Float4*>(
                            partials.o + part_of(out, row) * partials.o_stride + col) = values;
                    }
                }
            }
        }
    }
}

}  // namespace fa101::split_d_tf32
