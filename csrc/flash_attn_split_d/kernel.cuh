// Lesson 3, where a row is too long for a warp: head_dim over 256. The loop is fa2_cute's; new is
// that O of 32 queries, 32 x head_dim floats, fills the registers of several warps, so that warps
// have to work together on one row:
//
//   S = Q K^T   sums over D: a warp of dim group d multiplies its part of D and has partial logits;
//               the warps exchange them through shared memory, each adds up a share of the tiles
//   softmax     of the logits a warp owns; the maximum of a row is agreed on by all that share it
//   P           rounded to 16 bits, to shared memory, for every warp to read
//   O = P V     is wide: a warp has its own columns of O, and reads those of V and no others
//
//   step n        barrier        group barriers         barrier
//   each warp     | QK  exchange |  add, max  |  exp, P |  PV                |
//   cp.async      | V (n)                               |  K (n + 1)         |
//
// K and V have a buffer each: V (n) arrives during Q K^T, K (n + 1) during P V, so that something
// is always on its way. As in fa2_cute, the maximum follows lazily (cute/softmax.cuh): the vote on
// whether it moves and the barrier before P are one instruction.
//
// Registers at head_dim 512, 64 queries x 64 keys, 8 warps = 2 row groups x 2 key groups x 2 dim
// groups: O 32 x 128 / 32 lanes = 128, S 32 x 32 partial logits = 32, fragments of Q or P 8 and of
// K or V 4, m and l 6: 178 of 255, and ptxas uses most of the rest to load ahead. At 1024, 32
// queries x 32 keys, 8 warps = 8 dim groups: O 32 x 128 and S 32 x 32 again. At 768 64 queries just
// fit, O 192 and 32 x 16 logits. What depends on the thread or block index is worked out anew in
// every phase (place.cuh): kept, it would spill.
//
// Shared memory, bytes:                  head_dim 512, 64 x 64      1024, 32 x 32
//     Q                                        64 K                     64 K
//     K, V                                 64 K + 64 K              64 K + 64 K
//     exchanged logits, then P                 16 K                     32 K
//     maxima                                  0.5 K                    0.5 K
//     together                               208.5 K                  224.5 K   of 227 K a block
//
// and its traffic, in cycles of 128 bytes a step; the products are 2048 mma of 1.6 cycles or so at
// 512 and 1024 at 1024:
//     Q K^T  (2 pieces of Q + 2 of K, 8 mma)  2048                     1024
//     exchange, there and back                 256                      512
//     P V    (2 pieces of P + 8 of V, 32 mma) 1280                      640
//     cp.async                                1024                     1024
//     together                                4608 : 3300 mma          3200 : 1650 mma
// so shared memory sets the pace. Global memory: K and V once per query tile, kBlockM FLOP a byte
// from L2. At 64 that is 4 TB/s for 260 TFLOP/s; at 32, as much as L2 gives for 170.
//
// Why not more queries: O of 128 x 512 is the whole register file. Why not keys split alone, which
// needs no exchange: each warp would read all of Q, 3 pieces for 4 mma.
//
// Few query tiles, as in decoding, leave multiprocessors idle; then the keys are split over blocks
// too, and flash_decode's combine.cu merges the parts.
//
// Next rung: two blocks of a cluster could share K and V (TMA multicast), wgmma reads Q and K once
// for 64 rows.
//
// Sources: Dao 2023 (arXiv 2307.08691); the split of D over warps that FlashMLA and the large-head
// kernels of flash-attention 3 use for V, here for both products.
#pragma once

#include <fa101/params.h>

#include "common/bias_mask.h"
#include "common/mask.h"
#include "common/memory.cuh"
#include "common/online_softmax.h"
#include "common/packed.cuh"
#include "common/warp.cuh"
#include "cute/mask.cuh"
#include "cute/softmax.cuh"
#include "flash_attn_split_d/copy.cuh"
#include "flash_attn_split_d/kernel_traits.h"
#include "flash_attn_split_d/place.cuh"

#include <cstdint>
#include <limits>
#include <type_traits>

namespace fa101::split_d {

template <class Mma>
CUTE_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Mma::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}

// The barrier of a row group, whose warps share 32 queries.
template <class Traits>
CUTE_DEVICE void group_sync(int row_group) {
    if constexpr (Traits::kRowGroups == 1) {
        __syncthreads();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(row_group + 1), "n"(32 * Traits::kGroupWarps)
                     : "memory");
    }
}

// The same, and whether `condition` holds for any of its threads.
template <class Traits>
CUTE_DEVICE bool group_any(int row_group, bool condition) {
    if constexpr (Traits::kRowGroups == 1) {
        return __syncthreads_or(condition);
    } else {
        int any;
        asm volatile(
            "{\n"
            ".reg .pred p, q;\n"
            "setp.ne.s32 p, %1, 0;\n"
            "bar.red.or.pred q, %2, %3, p;\n"
            "selp.s32 %0, 1, 0, q;\n"
            "}\n"
            : "=r"(any)
            : "r"(static_cast<int>(condition)), "r"(row_group + 1), "n"(32 * Traits::kGroupWarps)
            : "memory");
        return any != 0;
    }
}

// Logits in base 2 are scale * q.k or, where cap_log2 > 0, cap_log2 * tanh(scale * q.k).
template <class Traits>
__global__ void __launch_bounds__(Traits::kNThreads, 1)
    split_d_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Tensors tensors,
                   const __grid_constant__ Partials partials, float scale, float cap_log2) {
    using Element = typename Traits::Element;
    using Mma = typename Traits::Mma;
    using DimShare = typename Traits::DimShare;
    using ColumnShare = typename Traits::ColumnShare;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr int kNThreads = Traits::kNThreads, kStages = Traits::kStages;
    constexpr int kDimGroups = Traits::kDimGroups, kKeyTiles = Traits::kKeyTiles;
    constexpr int kOwnTiles = Traits::kOwnTiles, kKeyParts = Traits::kKeyParts;
    constexpr int kPanelQ = kBlockM * kPanelRowBytes, kPanelKV = kBlockN * kPanelRowBytes;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();

    // ---- Which tile ----
    // Blocks of one head are neighbours, so its K and V stay in L2; with a mask the tiles that see
    // most keys start first, and the short ones fill the gaps at the end.
    const int seqlen_q = static_cast<int>(problem.seqlen_q);
    const int num_m_blocks = ceil_div(seqlen_q, kBlockM);
    const int num_heads = static_cast<int>(problem.num_heads);
    struct TileIndex {
        int m_begin, split, batch_head, bidb, bidh;
    };
    const auto tile_index = [&](int block) -> TileIndex {
        const int num_batch_heads = static_cast<int>(problem.batch) * num_heads;
        const int batch_head = block / num_m_blocks % num_batch_heads;
        return {(num_m_blocks - 1 - block % num_m_blocks) * kBlockM,
                block / num_m_blocks / num_batch_heads, batch_head, batch_head / num_heads,
                batch_head % num_heads};
    };
    const TileIndex tile = tile_index(blockIdx.x);
    const int m_begin = tile.m_begin, bidb = tile.bidb;
    const int bidh_kv = tile.bidh / (num_heads / static_cast<int>(problem.num_heads_kv));

    const Mask mask = mask_of(problem, tensors, bidb);
    const TileMask tile_mask = mask.tile(m_begin, kBlockM);
    const int m_end = min(m_begin + kBlockM, seqlen_q);
    const KeyRange tile_keys = {mask.key_begin(m_begin), mask.key_end(m_end - 1)};
    const KeyRange keys =
        keys_of_split(tile_keys, tile.split, partials.keys.count(tile_keys, kBlockN), kBlockN);
    const int n_block_begin = keys.begin / kBlockN;
    const int n_block_end = keys.is_empty() ? 0 : ceil_div(keys.end, kBlockN);
    const int n_block_full_begin = mask.n_block_full_begin(m_end, kBlockN);
    const int n_block_full_end = mask.n_block_full_end(m_begin, kBlockN);

    // Row r of the tile, as lse counts it, of the block's split.
    const auto part_of = [&](const TileIndex& at, int row) {
        return (int64_t{at.batch_head} * seqlen_q + at.m_begin + row) * partials.num_splits +
               at.split;
    };
    if (n_block_begin >= n_block_end && partials.num_splits > 1) {
        const int row = threadIdx.x;
        if (row < m_end - m_begin) partials.lse[part_of(tile, row)] = -kInfinity;
        return;
    }

    extern __shared__ __align__(128) unsigned char smem[];
    const uint32_t smem_address = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    auto* const row_values =
        reinterpret_cast<float (*)[kKeyParts]>(smem + Traits::kOffsetRows);  // [kBlockM]

    // ---- Copies ----
    const int head_dim = static_cast<int>(problem.head_dim);
    const int head_dim_v = static_cast<int>(problem.head_dim_v);
    // Padded to what a step of the loop over D takes; V's last columns need no padding, they only
    // reach columns of O that do not exist.
    const int num_panels = ceil_div(head_dim, Traits::kLoopPanels * kPanel) * Traits::kLoopPanels;
    const int num_panels_v = ceil_div(head_dim_v, kPanel);

    const auto load_k = [&](int n_block, int first, int last) {
        const int n_begin = n_block * kBlockN;
        const auto* k_ptr = static_cast<const Element*>(tensors.k_ptr) +
                            bidb * tensors.k_batch_stride + bidh_kv * tensors.k_head_stride +
                            n_begin * tensors.k_row_stride;
        load_panels<kBlockN, kNThreads>(smem + Traits::kOffsetK, k_ptr, tensors.k_row_stride,
                                        tile_mask.num_keys - n_begin, head_dim, first,
                                        min(last, num_panels), problem.aligned16);
    };
    const auto load_v = [&](int n_block, int first, int last) {
        const int n_begin = n_block * kBlockN;
        const auto* v_ptr = static_cast<const Element*>(tensors.v_ptr) +
                            bidb * tensors.v_batch_stride + bidh_kv * tensors.v_head_stride +
                            n_begin * tensors.v_row_stride;
        load_panels<kBlockN, kNThreads>(smem + Traits::kOffsetV, v_ptr, tensors.v_row_stride,
                                        tile_mask.num_keys - n_begin, head_dim_v, first,
                                        min(last, num_panels_v), problem.aligned16);
    };

    // ---- Prologue ----
    if (n_block_begin < n_block_end) {
        const auto* q_ptr = static_cast<const Element*>(tensors.q_ptr) +
                            bidb * tensors.q_batch_stride + tile.bidh * tensors.q_head_stride +
                            m_begin * tensors.q_row_stride;
        load_panels<kBlockM, kNThreads>(smem, q_ptr, tensors.q_row_stride, seqlen_q - m_begin,
                                        head_dim, 0, num_panels, problem.aligned16);
        if constexpr (kStages == 2) load_k(n_block_begin, 0, num_panels);
    }

    // [slice of 16 columns][tile of 8][row tile][fragment]
    float o[Traits::kSlices][2][2][4] = {};
    float row_max[2][2] = {{-kInfinity, -kInfinity}, {-kInfinity, -kInfinity}};
    float row_sum[2] = {};  // of the own row tile, over this lane's keys

    // ---- Main loop ----
    CUTE_NO_UNROLL
    for (int n_block = n_block_begin; n_block < n_block_end; ++n_block) {
        const int n_begin = n_block * kBlockN;
        // Some row may not see all of the block.
        const bool is_partial =
            problem.has_mask || n_block < n_block_full_begin || n_block >= n_block_full_end;

        if constexpr (kStages == 1) {
            __syncthreads();  // V (n - 1) is used up
            load_k(n_block, 0, num_panels);
        }
        cp_async_wait();
        __syncthreads();  // K (n) is there; V (n - 1) and the weights are used up

        // Partial logits: this warp's keys, its part of D.
        float s[kKeyTiles][2][4] = {};
        const Place<Traits> qk;
        const uint32_t q_address = smem_address + qk.q_offset();
        const uint32_t k_address = smem_address + qk.k_offset();
        int panel_v = 0;
        CUTE_NO_UNROLL
        for (int panel = 0; panel < num_panels; panel += Traits::kLoopPanels) {
            if constexpr (kStages == 2) {
                // In the first half of the loop, so that the last pieces have time to arrive.
                if (panel_v < num_panels_v) {
                    load_v(n_block, panel_v, panel_v + 2 * Traits::kLoopPanels);
                    panel_v += 2 * Traits::kLoopPanels;
                }
            }
            CUTE_UNROLL
            for (int step = 0; step < Traits::kUnroll * DimShare::kSteps; ++step) {
                const int at = panel + step / DimShare::kSteps * DimShare::kPanelStride;
                const int column = step % DimShare::kSteps << 5;
                uint32_t a[2][4];
                CUTE_UNROLL
                for (int i = 0; i < 2; ++i) {
                    ldmatrix(a[i],
                             (q_address ^ column) + at * kPanelQ + qk.tile_row(i) * kPanelRowBytes);
                }
                CUTE_UNROLL
                for (int t = 0; t < kKeyTiles; t += 2) {
                    uint32_t b[4];
                    ldmatrix(b, (k_address ^ column) + at * kPanelKV + t * 8 * kPanelRowBytes);
                    CUTE_UNROLL
                    for (int i = 0; i < 2; ++i) {
                        multiply<Mma>(s[t][i], a[i], b[0], b[2]);
                        multiply<Mma>(s[t + 1][i], a[i], b[1], b[3]);
                    }
                }
            }
        }
        if constexpr (kStages == 2) load_v(n_block, panel_v, num_panels_v);
        if constexpr (kStages == 1) __syncthreads();  // K is used up: the exchange goes there

        const Place<Traits> own;
        // The exchange. Of two warps each keeps a row tile; of more, each sends all it has, so that
        // no register number depends on who it is.
        float logits[kOwnTiles][4] = {};
        constexpr int kFirstSent = kDimGroups == 2 ? 1 : 0;
        const auto slot = [&](int from, int i, int t) {
            const int tile = (from * (2 - kFirstSent) + i - kFirstSent) * kKeyTiles + t;
            return reinterpret_cast<float4*>(smem + own.exchange_offset()) + tile * 32 + own.lane;
        };
        CUTE_UNROLL
        for (int t = 0; t < kKeyTiles; ++t) {
            if constexpr (kFirstSent == 1) {
                CUTE_UNROLL
                for (int e = 0; e < 4; ++e) logits[t][e] = s[t][0][e];
            }
            CUTE_UNROLL
            for (int i = kFirstSent; i < 2; ++i) {
                *slot(own.member, i, t) =
                    make_float4(s[t][i][0], s[t][i][1], s[t][i][2], s[t][i][3]);
            }
        }
        group_sync<Traits>(own.row_group);
        if (own.owns()) {
            // The warp whose dim group differs in the bits of `other` has this row tile as its own
            // or as its second one.
            CUTE_UNROLL
            for (int other = kFirstSent; other < kDimGroups; ++other) {
                CUTE_UNROLL
                for (int t = 0; t < kOwnTiles; ++t) {
                    const float4 part =
                        *slot(own.member ^ other, other % 2, own.part() * kOwnTiles + t);
                    logits[t][0] += part.x, logits[t][1] += part.y;
                    logits[t][2] += part.z, logits[t][3] += part.w;
                }
            }
        }

        // Scale, softcap, bias, mask.
        const auto for_logits = [&](auto&& visit) {
            const TileIndex at = tile_index(reread_block_index());
            const BiasMask bias_mask(problem, tensors, at.bidb, at.bidh);
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
                const int row = own.row(0) + 8 * r, query = at.m_begin + row;
                const int begin = tile_mask.key_begin(row);
                const int end = query < seqlen_q ? tile_mask.key_end(row) : 0;
                CUTE_UNROLL
                for (int j = 0; j < 2 * kOwnTiles; ++j) {
                    const int key = n_begin + own.key() + j / 2 * 8 + j % 2;
                    visit(logits[j / 2][2 * r + j % 2], bias_mask, query, key,
                          begin <= key && key < end);
                }
            }
        };
        CUTE_UNROLL
        for (int j = 0; j < 4 * kOwnTiles; ++j) logits[j / 4][j % 4] *= scale;
        if (cap_log2 > 0.0f) {
            CUTE_UNROLL
            for (int j = 0; j < 4 * kOwnTiles; ++j) {
                logits[j / 4][j % 4] = tanhf(logits[j / 4][j % 4]) * cap_log2;
            }
        }
        if (problem.has_bias && own.owns()) {
            for_logits([&](float& s, const BiasMask& bias_mask, int query, int key, bool sees) {
                if (!sees) return;
                s += base2_bias(to_float(bias_mask.bias_at(query, key), problem.dtype_bias));
            });
        }
        if (is_partial && own.owns()) {
            for_logits([&](float& s, const BiasMask& bias_mask, int query, int key, bool sees) {
                if (!sees || bias_mask.hides(query, key)) s = -kInfinity;
            });
        }

        // The maximum, where one moves: agreed on by all warps of the group.
        float block_max[2] = {-kInfinity, -kInfinity};
        if (own.owns()) {
            CUTE_UNROLL
            for (int j = 0; j < 4 * kOwnTiles; ++j) {
                block_max[j / 2 % 2] = fmaxf(block_max[j / 2 % 2], logits[j / 4][j % 4]);
            }
        }
        constexpr float kSlack = OnlineSoftmax<2>::kSlack;
        const bool exceeds =
            block_max[0] > row_max[0][0] + kSlack || block_max[1] > row_max[0][1] + kSlack;
        if (group_any<Traits>(own.row_group, exceeds)) {
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
                block_max[r] = quad_max(block_max[r]);
                if (own.owns() && own.lane % 4 == 0) {
                    row_values[own.row(0) + 8 * r][own.key_part()] = block_max[r];
                }
            }
            group_sync<Traits>(own.row_group);
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {
                CUTE_UNROLL
                for (int r = 0; r < 2; ++r) {
                    const float* parts = row_values[own.row(i) + 8 * r];
                    float new_max = parts[0];
                    CUTE_UNROLL
                    for (int part = 1; part < kKeyParts; ++part) {
                        new_max = fmaxf(new_max, parts[part]);
                    }
                    if (!(new_max > row_max[i][r] + kSlack)) continue;
                    const float rescale = exp2_approx(row_max[i][r] - new_max);
                    row_max[i][r] = new_max;
                    if (i == 0) row_sum[r] *= rescale;
                    CUTE_UNROLL
                    for (int c = 0; c < 2 * Traits::kSlices; ++c) {
                        o[c / 2][c % 2][i][2 * r] *= rescale;
                        o[c / 2][c % 2][i][2 * r + 1] *= rescale;
                    }
                }
            }
        }
        if constexpr (kStages == 1) load_v(n_block, 0, num_panels_v);

        // The weights. The exchange was read before the vote, so P may take its place.
        if (own.owns()) {
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
                const float m = safe_row_max(row_max[0][r]);
                unsigned char* const row =
                    smem + own.weights_offset() + (own.row(0) % 32 + 8 * r) * Traits::kWeightsPitch;
                CUTE_UNROLL
                for (int t = 0; t < kOwnTiles; ++t) {
                    const float x = exp2_approx(logits[t][2 * r] - m);
                    const float y = exp2_approx(logits[t][2 * r + 1] - m);
                    row_sum[r] += x + y;
                    *reinterpret_cast<uint32_t*>(row + 2 * (own.key() + 8 * t)) =
                        pack<Element>(x, y);
                }
            }
        }

        // V (n) and all weights are there; K (n) is used up. A hidden key has weight 0, but
        // 0 * NaN = NaN: where rows may not see all of V, see whether it is finite.
        cp_async_wait();
        bool found_any = false;
        if (is_partial) {
            uint32_t found = 0;
            for_own_pieces<kBlockN, kNThreads>(0, num_panels_v, [&](int, int, int offset) {
                const auto piece = *reinterpret_cast<uint4*>(smem + Traits::kOffsetV + offset);
                found |= nonfinite<Element>(piece.x) | nonfinite<Element>(piece.y) |
                         nonfinite<Element>(piece.z) | nonfinite<Element>(piece.w);
            });
            found_any = __syncthreads_or(found != 0);
        } else {
            __syncthreads();
        }
        if (found_any) {
            // Hardly ever: what is not finite goes to the rows that see it here, and is 0 below.
            const Place<Traits> at;
            CUTE_NO_UNROLL
            for (int j = 0; j < kBlockN; ++j) {
                uint32_t sees = 0;  // bit 2 * i + r: row r of row tile i does
                CUTE_NO_UNROLL
                for (int bit = 0; bit < 4; ++bit) {
                    const TileIndex block = tile_index(reread_block_index());
                    const int row = at.row(bit / 2) + bit % 2 * 8, key = n_begin + j;
                    const int query = block.m_begin + row;
                    if (query < seqlen_q && tile_mask.key_begin(row) <= key &&
                        key < tile_mask.key_end(row) &&
                        !BiasMask(problem, tensors, block.bidb, block.bidh).hides(query, key)) {
                        sees |= 1u << bit;
                    }
                }
                CUTE_UNROLL
                for (int c = 0; c < 2 * Traits::kSlices; ++c) {
                    const uint32_t pair = *reinterpret_cast<const uint32_t*>(
                        smem + Traits::kOffsetV + at.column_panel(c / 2) * kPanelKV +
                        piece_offset(j, at.column_piece(c)) + at.lane % 4 * 4);
                    if (!nonfinite<Element>(pair)) continue;
                    CUTE_UNROLL
                    for (int e = 0; e < 2; ++e) {
                        const Element v = Element::bitcast(pair >> (16 * e) & 0xffff);
                        if (!is_nonfinite(v)) continue;
                        CUTE_UNROLL
                        for (int bit = 0; bit < 4; ++bit) {
                            if (!(sees >> bit & 1)) continue;
                            o[c / 2][c % 2][bit / 2][bit % 2 * 2 + e] += static_cast<float>(v);
                        }
                    }
                }
            }
            __syncthreads();
            for_own_pieces<kBlockN, kNThreads>(0, num_panels_v, [&](int, int, int offset) {
                auto* piece = reinterpret_cast<Element*>(smem + Traits::kOffsetV + offset);
                CUTE_NO_UNROLL
                for (int j = 0; j < 8; ++j) {
                    if (is_nonfinite(piece[j])) piece[j] = Element(0);
                }
            });
            __syncthreads();
        }

        // O += P V, this warp's columns; meanwhile the next K.
        const Place<Traits> pv;
        const uint32_t v_address = smem_address + pv.v_offset();
        const uint32_t p_address[2] = {smem_address + pv.p_offset(0),
                                       smem_address + pv.p_offset(1)};
        CUTE_NO_UNROLL
        for (int k = 0; k < kBlockN / 16; ++k) {
            if constexpr (kStages == 2) {
                constexpr int kChunks = kBlockN / 16 < 2 ? 1 : 2;
                const int chunk = ceil_div(num_panels, kChunks);
                if (k < kChunks && n_block + 1 < n_block_end) {
                    load_k(n_block + 1, k * chunk, (k + 1) * chunk);
                }
            }
            uint32_t a[2][4];
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {
                ldmatrix(a[i], p_address[i] + k * 32);
            }
            CUTE_UNROLL
            for (int slice = 0; slice < Traits::kSlices; ++slice) {
                const int panel = slice / ColumnShare::kSteps * ColumnShare::kPanelStride;
                const int column = slice % ColumnShare::kSteps << 5;
                uint32_t b[4];
                ldmatrix_transposed(
                    b, (v_address ^ column) + panel * kPanelKV + k * 16 * kPanelRowBytes);
                CUTE_UNROLL
                for (int i = 0; i < 2; ++i) {
                    multiply<Mma>(o[slice][0][i], a[i], b[0], b[1]);
                    multiply<Mma>(o[slice][1][i], a[i], b[2], b[3]);
                }
            }
        }
    }

    // ---- Epilogue: the sums of all parts, O / l and lse; O through the memory of Q, or, of a
    // split, as it is ----
    const Place<Traits> own;
    const TileIndex out = tile_index(reread_block_index());
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
        row_sum[r] = quad_sum(row_sum[r]);
        if (own.owns() && own.lane % 4 == 0) {
            row_values[own.row(0) + 8 * r][own.key_part()] = row_sum[r];
        }
    }
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
            const int row = own.row(i) + 8 * r;
            float sum = 0.0f;
            CUTE_UNROLL
            for (int part = 0; part < kKeyParts; ++part) sum += row_values[row][part];
            const bool exists = out.m_begin + row < seqlen_q;
            if (i == 0 && own.key_part() == 0 && own.lane % 4 == 0 && exists) {
                if (partials.num_splits > 1) {
                    partials.lse[part_of(out, row)] = row_max[0][r] + log2f(sum);
                } else if (tensors.lse_ptr != nullptr) {
                    tensors.lse_ptr[part_of(out, row)] = log_sum_exp(row_max[0][r], sum);
                }
            }
            const float inverse = inverse_row_sum(sum);
            CUTE_UNROLL
            for (int c = 0; c < 2 * Traits::kSlices; ++c) {
                const float x = o[c / 2][c % 2][i][2 * r] * inverse;
                const float y = o[c / 2][c % 2][i][2 * r + 1] * inverse;
                const int panel = own.column_panel(c / 2), piece = own.column_piece(c);
                if (partials.num_splits > 1) {
                    const int col = panel * kPanel + piece * 8 + own.lane % 4 * 2;
                    if (!exists || col >= head_dim_v) continue;
                    *reinterpret_cast<float2*>(partials.o + part_of(out, row) * partials.o_stride +
                                               col) = make_float2(x, y);
                } else {
                    *reinterpret_cast<uint32_t*>(smem + panel * kPanelQ + piece_offset(row, piece) +
                                                 own.lane % 4 * 4) = pack<Element>(x, y);
                }
            }
        }
    }
    if (partials.num_splits > 1) return;
    __syncthreads();
    auto* o_ptr = static_cast<Element*>(tensors.o_ptr) + out.bidb * tensors.o_batch_stride +
                  out.bidh * tensors.o_head_stride + out.m_begin * tensors.o_row_stride;
    store_panels<kBlockM, kNThreads>(smem, o_ptr, tensors.o_row_stride, seqlen_q - out.m_begin,
                                     head_dim_v, problem.aligned16);
}

}  // namespace fa101::split_d
