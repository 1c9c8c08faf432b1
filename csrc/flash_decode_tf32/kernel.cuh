// Lesson 4 for float32: few queries, keys split over blocks. The frame is flash_decode's (rows are
// pairs of a query and a head of the group, a team of warps has keys of its own, combine.cu merges
// the splits); the products are flash_attn_tf32's, three TF32 for one.
//
// Why tensor cores, where one query is a sixteenth of their smallest tile? Memory should set the
// pace for any group of up to 16 heads with one kernel. 8192 keys of 8 heads of 128 are 67 MB, 14
// us of an H200's 4.8 TB/s. A step of 16 keys is 192 mma and about 1000 other instructions of a
// warp: 4096 steps over 528 schedulers, some 5 us by this count. On CUDA cores a row would cost a
// fifth of that, and a group of 8 more than all of it. Measured, with the merge: 37.5 us, half of
// torch's best, and 1.8 TB/s; what binds it is not known yet.
//
//      rows (query, head)             keys ->   split 0     split 1     split 2
//      16 rows: a block of 4 warps              0123 0123 | 0123 0123 | 0123 0123   warp of a step
//      64 rows: 16 to each warp                 all  all  | all  all  | all  all
//
// A team's keys come as a chain of tiles, K, V, K, V, ..., through kSlots places in shared memory:
// while one is used, the next kSlots - 1 are on their way. A group of cp.async is one tile. So the
// loop has two waits and two barriers of the team a step, and needs no more memory than what is in
// flight and one tile.
//
// Registers at head_dim 128: O 16 x 128 / 32 lanes = 64, S 8, fragments of Q 16, K 16 or V 32.
//
// Not-a-numbers are lesson 3's for float32: the loop runs as if all were finite, and if something
// else comes out, hardly ever, the team runs it again with care.
#pragma once

#include <fa101/params.h>

#include "common/bias_mask.h"
#include "common/key_rows.h"
#include "common/mask.h"
#include "common/memory.cuh"
#include "common/mma_tile.cuh"
#include "common/online_softmax.h"
#include "common/warp.cuh"
#include "flash_attn_tf32/mma.cuh"
#include "flash_attn_tf32/tiles.cuh"
#include "flash_decode_tf32/family.h"
#include "flash_decode_tf32/tile_config.h"

#include <cstdint>

namespace fa101::decode_tf32 {

template <int kTileIndex>
__global__ void __launch_bounds__(32 * kTiles[kTileIndex].num_warps, 2)
    decode_tf32_kernel(const __grid_constant__ Problem problem,
                       const __grid_constant__ Tensors tensors,
                       const __grid_constant__ Partials partials) {
    constexpr TileConfig kTile = kTiles[kTileIndex];
    constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kHeadDim = kTile.head_dim;
    constexpr int kSlots = kTile.slots, kStride = kTile.stride();
    constexpr int kNThreads = 32 * kTile.num_warps, kNumTeams = kTile.num_teams();
    constexpr int kTeamThreads = kNThreads / kNumTeams, kSlotFloats = kBlockN * kStride;
    constexpr int kDepth = 8 * tf32::kSteps;  // columns of Q and K, or keys of P and V, of one sum
    constexpr int kTogether = 4;              // mma tiles of O worked on at a time
    static_assert(kBlockM * kNumTeams == 16 * kTile.num_warps, "a warp owns 16 rows");
    static_assert(kBlockN % kMinPageSize == 0, "copied 16 keys at a time");
    static_assert(kBlockN % kDepth == 0 && kHeadDim % (8 * kTogether) == 0, "whole mma tiles");

    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler: one for a warp
    const int team = kNumTeams == 1 ? 0 : warp, warp_row = kNumTeams == 1 ? 16 * warp : 0;
    const auto get_lane = [] { return reread_thread_index<kNThreads>() % 32; };
    const auto team_thread = [] { return reread_thread_index<kNThreads>() % kTeamThreads; };
    const auto team_sync = [] {
        if constexpr (kNumTeams == 1) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    };
    const auto team_any = [](bool x) -> bool {  // and a barrier
        if constexpr (kNumTeams == 1) {
            return __syncthreads_or(x);
        } else {
            __syncwarp();
            return __any_sync(~0u, x);
        }
    };

    // ---- Which rows and which keys ----
    // Tiles of rows are neighbours, so that their common keys come from L2.
    const int seqlen_q = static_cast<int>(problem.seqlen_q);
    const int head_dim = static_cast<int>(problem.head_dim);
    const int head_dim_v = static_cast<int>(problem.head_dim_v);
    const int num_heads_kv = static_cast<int>(problem.num_heads_kv);
    const int group_size = static_cast<int>(problem.num_heads) / num_heads_kv;
    const int num_rows = seqlen_q * group_size;
    struct TileIndex {
        int m_begin, split, bidh_kv, bidb;
    };
    const auto tile_index = [&](int block) -> TileIndex {
        const int num_m_blocks = ceil_div(num_rows, kBlockM);
        const int num_batch_heads = static_cast<int>(problem.batch) * num_heads_kv;
        const int split_batch_head = block / num_m_blocks;
        const int batch_head = split_batch_head % num_batch_heads;
        return {block % num_m_blocks * kBlockM, split_batch_head / num_batch_heads,
                batch_head % num_heads_kv, batch_head / num_heads_kv};
    };
    const auto query_of = [&](int row) { return row / group_size; };
    const auto head_of = [&](const TileIndex& tile, int row) {
        return tile.bidh_kv * group_size + row % group_size;
    };
    const auto index_of = [&](const TileIndex& tile, int row) {  // as in lse
        return (tile.bidb * problem.num_heads + head_of(tile, row)) * seqlen_q + query_of(row);
    };
    const TileIndex tile = tile_index(blockIdx.x);
    const int m_begin = tile.m_begin, split = tile.split, bidb = tile.bidb;

    const Mask mask = mask_of(problem, tensors, bidb);
    const int first_query = query_of(m_begin);
    const int last_query = query_of(min(m_begin + kBlockM, num_rows) - 1);
    const KeyRange tile_keys = {mask.key_begin(first_query), mask.key_end(last_query)};
    const KeyRange keys =
        keys_of_split(tile_keys, split, partials.keys.count(tile_keys, kBlockN), kBlockN);
    const int n_begin = keys.begin, n_end = keys.end;
    // Keys that all rows see.
    const int full_begin = mask.key_begin(last_query), full_end = mask.key_end(first_query);

    if (n_begin >= n_end && partials.num_splits > 1) {
        for (int row = m_begin + threadIdx.x; row < min(m_begin + kBlockM, num_rows);
             row += kNThreads) {
            partials.lse[index_of(tile, row) * partials.num_splits + split] = -INFINITY;
        }
        return;
    }

    // This team's steps: every kNumTeams-th block of keys.
    const int first_block = n_begin / kBlockN;
    const int n_block_begin =
        first_block + (team + kNumTeams - first_block % kNumTeams) % kNumTeams;
    const int n_block_end = n_begin < n_end ? ceil_div(n_end, kBlockN) : 0;

    // ---- Shared memory, and the copies into it ----
    extern __shared__ __align__(16) float shared[];
    float* const sQ = shared;  // (BlockM, stride)
    float* const slots =
        sQ + kBlockM * kStride + team * kSlots * kSlotFloats;  // [(BlockN, stride)]
    const auto slot = [&](int tile) { return slots + tile % kSlots * kSlotFloats; };

    // The chain: tile 2i is K, 2i + 1 V of the team's block i. Past its end tiles are empty, so
    // that groups count them. Keys from n_end on become zeros. 16 keys at a time, which lie in one
    // page where there are pages.
    const auto load = [&](int chain_tile) {
        const int n_block = n_block_begin + chain_tile / 2 * kNumTeams;
        if (n_block < n_block_end) {
            const bool is_v = chain_tile % 2 != 0;
            const int64_t row_stride = is_v ? tensors.v_row_stride : tensors.k_row_stride;
#pragma unroll 1
            for (int n = 0; n < kBlockN; n += kMinPageSize) {
                const int first = n_block * kBlockN + n;
                int entry = bidb;  // of the batch, or the page whose row 0 is key page_begin
                int64_t page_begin = 0;
                if (problem.page_size > 0 && first < n_end) {
                    const Pages pages(problem, tensors, bidb);
                    entry = static_cast<int>(pages.page_of(first));
                    page_begin = first - pages.row_of(first);
                }
                const float* const ptr =
                    is_v ? mma::head_ptr<float>(tensors.v_ptr, tensors.v_batch_stride,
                                                tensors.v_head_stride, entry, tile.bidh_kv)
                         : mma::head_ptr<float>(tensors.k_ptr, tensors.k_batch_stride,
                                                tensors.k_head_stride, entry, tile.bidh_kv);
                tf32::copy_rows<kMinPageSize, kHeadDim, kStride, kTeamThreads>(
                    team_thread(), slot(chain_tile) + n * kStride, ptr - page_begin * row_stride,
                    row_stride, first, n_end, is_v ? head_dim_v : head_dim, problem.aligned16);
            }
        }
        cp_async_commit();
    };
    const auto load_first = [&] {
#pragma unroll 1
        for (int i = 0; i < kSlots - 1; ++i) load(i);
    };
    // Tile i of the chain is there, and the team is done with the one before: its slot is filled.
    const auto advance_to = [&](int i) {
        cp_async_wait_group<kSlots - 2>();
        team_sync();
        load(i + kSlots - 1);
    };

    // Rows past the end repeat the last.
    for (int i = threadIdx.x; i < kBlockM * (kHeadDim / 4); i += kNThreads) {
        const int tile_row = i / (kHeadDim / 4), col = i % (kHeadDim / 4) * 4;
        const int row = min(m_begin + tile_row, num_rows - 1);
        const float* const q_ptr =
            static_cast<const float*>(tensors.q_ptr) + bidb * tensors.q_batch_stride +
            head_of(tile, row) * tensors.q_head_stride + query_of(row) * tensors.q_row_stride;
        copy4(sQ + tile_row * kStride + col, q_ptr + col, head_dim - col, problem.aligned16);
    }
    cp_async_commit();
    load_first();

    // ---- This lane's two rows, and the keys they see ----
    const auto row_of = [&](int m_begin, int r) {
        return min(m_begin + warp_row + get_lane() / 4 + 8 * r, num_rows - 1);
    };
    int row_begin[2], row_end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = query_of(row_of(m_begin, r));
        row_begin[r] = mask.key_begin(query);
        row_end[r] = mask.key_end(query);
    }
    const auto is_within = [&](int r, int key) { return row_begin[r] <= key && key < row_end[r]; };
    // The arrays of the caller for row r of this lane, worked out anew where they are needed.
    struct Extras {
        int query;
        BiasMask arrays;
    };
    const auto extras = [&](int r) -> Extras {
        const TileIndex here = tile_index(reread_block_index());
        const int row = row_of(here.m_begin, r);
        return {query_of(row), BiasMask(problem, tensors, here.bidb, head_of(here, row))};
    };
    const bool is_idle =
        m_begin + warp_row >= num_rows;  // all of this warp's rows are past the end

    cp_async_wait_group<kSlots - 1>();
    __syncthreads();  // Q is there

    // ---- Main loop ----
    mma::Tile<1, kHeadDim / 8> o;
    mma::OnlineSoftmax<1> softmax;
    const auto step = [&](int chain_tile, bool careful) {
        const int key_begin = (n_block_begin + chain_tile / 2 * kNumTeams) * kBlockN;
        // With the mask only some rows may see some of these keys.
        const bool is_partial =
            problem.has_mask || key_begin < full_begin || key_begin + kBlockN > full_end;
        float* const sK = slot(chain_tile);
        float* const sV = slot(chain_tile + 1);

        advance_to(chain_tile);
        mma::Tile<1, kBlockN / 8> s = {};
        if (!is_idle) {
            // ---- S = Q K^T ----
            const int lane = get_lane();
            const float* const q_lane = sQ + (warp_row + lane % 16) * kStride + lane / 16 * 4;
            const float* const k_lane = sK + lane % 8 * kStride + lane / 8 * 4;
#pragma unroll 2
            for (int d = 0; d < head_dim; d += kDepth) {
                tf32::Split<4> q[1][tf32::kSteps];
                tf32::Split<2> k[kBlockN / 8][tf32::kSteps];
                tf32::load_rows<kStride>(q, q_lane + d);
                tf32::load_k<kStride>(k, k_lane + d);
                tf32::multiply_add(s, 0, 0, q, k);
            }
            if (careful) {
                tf32::replace_nans<kStride>(s, sQ + warp_row * kStride, sK, head_dim, lane);
            }

            // ---- To logits of base 2, and to weights ----
            const auto for_logits = [&](auto&& visit) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const Extras extra = extras(r);
#pragma unroll
                    for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
                        for (int i = 2 * r; i < 2 * r + 2; ++i) {
                            const int key = key_begin + lane % 4 * 2 + mma::col_of(n, i);
                            visit(s[0][n][i], extra, key, is_within(r, key));
                        }
                    }
                }
            };
            if (problem.softcap > 0.0f) {
                const float scale = problem.softmax_scale / problem.softcap;
                const float softcap_log2 = problem.softcap * kLog2e;
                mma::for_each(
                    s, [&](float& x, int, int, int) { x = softcap_log2 * tanhf(x * scale); });
            } else {
                const float scale_log2 = problem.softmax_scale * kLog2e;
                mma::for_each(s, [&](float& x, int, int, int) { x *= scale_log2; });
            }
            if (problem.has_bias) {
                for_logits([&](float& x, const Extras& extra, int key, bool sees) {
                    if (!sees) return;
                    x += base2_bias(
                        *static_cast<const float*>(extra.arrays.bias_at(extra.query, key)));
                });
            }
            if (is_partial) {
                for_logits([&](float& x, const Extras& extra, int key, bool sees) {
                    if (!sees || extra.arrays.hides(extra.query, key)) x = -INFINITY;
                });
            }
            softmax.step(s, o);
        }

        advance_to(chain_tile + 1);
        if (careful) {
            if (!is_idle) {
                const int lane = get_lane();
                mma::add_nonfinite(
                    o, kBlockN,
                    [&](int key, int n, int i) {
                        return sV[key * kStride + tf32::o_col(lane, n, i)];
                    },
                    [&](int, int i, int key) {
                        const Extras extra = extras(i / 2);
                        return is_within(i / 2, key_begin + key) &&
                               !extra.arrays.hides(extra.query, key_begin + key);
                    });
            }
            team_sync();
            tf32::make_splittable<kTeamThreads>(sV, kSlotFloats, team_thread());
            team_sync();
        }

        // ---- O += P V ----
        if (!is_idle) {
            const int lane = get_lane();
            const float* const v_lane = sV + lane % 4 * 2 * kStride + lane / 4 * 2;
#pragma unroll
            for (int t = 0; t < kBlockN / kDepth; ++t) {
                tf32::Split<4> p[1][tf32::kSteps];
                tf32::split_weights(p, s, t * tf32::kSteps);
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; n += kTogether) {
                    if (8 * n >= head_dim_v) break;
                    tf32::Split<2> v[kTogether][tf32::kSteps];
                    tf32::load_v<kStride>(v, v_lane + kDepth * t * kStride + 8 * n);
                    tf32::multiply_add(o, 0, n, p, v);
                }
            }
        }
    };
#pragma unroll 1
    for (bool careful = false;; careful = true) {
        softmax.reset();
        mma::for_each(o, [](float& x, int, int, int) { x = 0.0f; });
#pragma unroll 1
        for (int i = 0; n_block_begin + i / 2 * kNumTeams < n_block_end; i += 2) step(i, careful);

        if (careful || !team_any(softmax.has_nonfinite(o))) break;
        load_first();
    }

    // ---- Epilogue: merge the teams, O / l and lse ----
    // In the place of Q, K and V: O, m and l of every team, (kNumTeams, kBlockM) rows.
    constexpr int kRows = kNumTeams * kBlockM;
    float* const sO = shared;
    float* const sMax = sO + kRows * kStride;
    float* const sSum = sMax + kRows;
    const TileIndex out_tile = tile_index(reread_block_index());
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int lane = get_lane(), row = 16 * warp + lane / 4 + 8 * r;
        const float sum = quad_sum(softmax.row_sum[0][r]);
        if (lane % 4 == 0) {
            sMax[row] = softmax.row_max[0][r];
            sSum[row] = sum;
        }
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; n += 2) {
            *reinterpret_cast<Float4*>(sO + row * kStride + tf32::o_col(lane, n, 0)) = {
                o[0][n][2 * r], o[0][n + 1][2 * r], o[0][n][2 * r + 1], o[0][n + 1][2 * r + 1]};
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlockM * (kHeadDim / 4); i += kNThreads) {
        const int tile_row = i / (kHeadDim / 4), col = i % (kHeadDim / 4) * 4;
        const int row = out_tile.m_begin + tile_row;
        if (row >= num_rows || col >= head_dim_v) continue;

        float row_max = -INFINITY, row_sum = 0.0f;
#pragma unroll
        for (int t = 0; t < kNumTeams; ++t) row_max = fmaxf(row_max, sMax[t * kBlockM + tile_row]);
        Float4 out = {};
#pragma unroll
        for (int t = 0; t < kNumTeams; ++t) {
            const int r = t * kBlockM + tile_row;
            const float weight = exp2_approx(sMax[r] - safe_row_max(row_max));
            row_sum += weight * sSum[r];
            const Float4 part = *reinterpret_cast<const Float4*>(sO + r * kStride + col);
#pragma unroll
            for (int j = 0; j < 4; ++j) out.x[j] += weight * part.x[j];
        }
        const float inverse = inverse_row_sum(row_sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) out.x[j] = row_sum == 0.0f ? 0.0f : out.x[j] * inverse;

        const int64_t index = index_of(out_tile, row);
        if (partials.num_splits > 1) {
            const int64_t part = index * partials.num_splits + out_tile.split;
            *reinterpret_cast<Float4*>(partials.o + part * partials.o_stride + col) = out;
            if (col == 0) partials.lse[part] = row_max + log2f(row_sum);
        } else {
            auto* const o_ptr = static_cast<float*>(tensors.o_ptr) +
                                out_tile.bidb * tensors.o_batch_stride +
                                head_of(out_tile, row) * tensors.o_head_stride +
                                query_of(row) * tensors.o_row_stride;
            store4(o_ptr + col, out, head_dim_v - col, problem.aligned16);
            if (col == 0 && tensors.lse_ptr != nullptr) {
                tensors.lse_ptr[index] = log_sum_exp(row_max, row_sum);
            }
        }
    }
}

}  // namespace fa101::decode_tf32
