// The merge of the parts that the splits leave, at the end of the launch that makes them. For each
// row, over the splits i of the keys its tile sees,
//
//     m = max lse_i      l = sum_i 2^(lse_i - m)      O = sum_i 2^(lse_i - m) O_i / l
//     lse = m + log2 l   (to base 2 until here)
//
// A second kernel would start when the last block of the first is gone: 4 us, of the 20 that a
// short cache took. Here the last blocks of the same grid merge. They find out what there is to
// merge while others still read keys, and then wait for a flag a part:
//
//      grid      keys of split 0 | of split 1 | of split 2 | merge
//                publish O, lse, then their flags ----------> wait, absorb, store
//
// Blocks start in the order of their index. CUDA does not promise it, but GPUs do it, and CUTLASS's
// stream-K counts on it too. So when one that merges runs, all that it waits for have started, and
// those wait for nobody: no deadlock, whatever else the GPU does.
//
// Nobody clears the workspace, so a flag is up when it equals the launch's nonce (common/nonce.h).
// Who has seen it takes it down.
//
// A batch of parts is on its way at once, up to 8 KB a warp. They are absorbed as the online
// softmax absorbs keys, in the order of the splits, in which their blocks started. It depends on
// nothing else, and parts that are not there add exactly nothing.
#pragma once

#include <fa101/params.h>

#include "common/dependent.cuh"
#include "common/divider.h"
#include "common/flag.cuh"
#include "common/mask.h"
#include "common/memory.cuh"
#include "common/online_softmax.h"
#include "common/warp.cuh"
#include "flash_decode/family.h"

#include <cstdint>

namespace fa101::flash_decode {

// The keys that some row of a tile sees; each may see fewer.
__device__ __forceinline__ KeyRange keys_of_tile(const Mask& mask, int first_row, int last_row,
                                                 const Divider& group) {
    return {mask.key_begin(group.quotient(first_row)), mask.key_end(group.quotient(last_row))};
}

// Past L1, which may hold what was there before.
__device__ __forceinline__ Float4 load_part(const float* src) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(src));
    return {x.x, x.y, x.z, x.w};
}

// The state of the online softmax for columns 4 * lane + 128 * v of one row, whole warps agreeing
// on m and l.
template <int kVectors>
struct Merge {
    float row_max = -INFINITY, row_sum = 0.0f;
    Float4 acc[kVectors] = {};

    // Makes room for logits up to `largest`; returns what to subtract from them.
    __device__ __forceinline__ float raise(float largest) {
        const float new_max = fmaxf(row_max, largest);
        const float m = safe_row_max(new_max), scale = exp2f(row_max - m);
        row_max = new_max;
        row_sum *= scale;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[v].x[j] *= scale;
        }
        return m;
    }
    __device__ __forceinline__ void add(float weight, float sum, const Float4 (&part)[kVectors]) {
        row_sum += weight * sum;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[v].x[j] += weight * part[v].x[j];
        }
    }
};

// A warp a row or, of few rows with many parts, all warps of the block: each absorbs some batches.
template <class Traits>
__device__ __forceinline__ void merge_parts(const Problem& problem, const Tensors& tensors,
                                            const Partials& partials, void* smem) {
    using Element = typename Traits::Element;
    constexpr int kNWarps = Traits::kNThreads / 32;
    constexpr int kVectors = ceil_div(Traits::kHeadDim, 128);
    constexpr int kBatch = merge_batch(Traits::kHeadDim);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool is_shared = partials.rows_per_merge == 1;
    const int block = static_cast<int>(blockIdx.x) - partials.key_blocks;
    const int row = is_shared ? block : block * kNWarps + warp;

    // ---- Which row, and which parts of it ----
    const int seqlen_q = static_cast<int>(problem.seqlen_q);
    const int num_heads = static_cast<int>(problem.num_heads);
    const int group_size = static_cast<int>(partials.group.divisor);
    const int query = row % seqlen_q, bidh = row / seqlen_q % num_heads;
    const int bidb = row / seqlen_q / num_heads;
    if (bidb >= problem.batch) return;  // not where warps share a row
    const int m_begin =
        (query * group_size + partials.group.remainder(bidh)) / Traits::kBlockM * Traits::kBlockM;
    const int m_end = min(m_begin + Traits::kBlockM, seqlen_q * group_size);
    start_next();
    wait_for_stream();
    const KeyRange tile_keys =
        keys_of_tile(mask_of(problem, tensors, bidb), m_begin, m_end - 1, partials.group);
    const int num_parts = partials.keys.count(tile_keys, Traits::kBlockN);
    if (num_parts == 1) return;  // its block writes the result

    // ---- Absorb the parts ----
    // The first turn is before the first part and adds nothing: it only fetches the instructions,
    // which would come from memory just when the flags are there.
    Merge<kVectors> merge;
    const int turn = is_shared ? kNWarps * kBatch : kBatch;
#pragma unroll 1
    for (int first = (is_shared ? warp * kBatch : 0) - turn; first < num_parts; first += turn) {
        const int64_t first_part = static_cast<int64_t>(row) * partials.num_splits + first;
        const auto is_there = [&](int i) { return 0 <= first && first + i < num_parts; };
        const bool has_part = lane < kBatch && is_there(lane);
        if (has_part) {
            uint64_t* const flag = partials.flags + first_part + lane;
            await_flag(flag, partials.nonce);
            *flag = 0;
        }
        acquire();
        __syncwarp();
        const float lane_lse = has_part ? __ldcg(partials.lse + first_part + lane) : -INFINITY;
        Float4 parts[kBatch][kVectors] = {};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const float* const src = partials.o + (first_part + i) * partials.o_stride + 4 * lane;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (is_there(i) && 128 * v + 4 * lane < problem.head_dim_v) {
                    parts[i][v] = load_part(src + 128 * v);
                }
            }
        }
        const float lane_weight = exp2f(lane_lse - merge.raise(warp_max(lane_lse)));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            merge.add(__shfl_sync(0xffffffffu, lane_weight, i), 1.0f, parts[i]);
        }
    }

    if (is_shared) {
        struct State {
            Float4 acc[kVectors][32];
            float row_max, row_sum;
        };
        State* const states = static_cast<State*>(smem);
        static_assert(kNWarps * sizeof(State) <= Traits::kSmemBytes, "a state each");
#pragma unroll
        for (int v = 0; v < kVectors; ++v) states[warp].acc[v][lane] = merge.acc[v];
        if (lane == 0) {
            states[warp].row_max = merge.row_max;
            states[warp].row_sum = merge.row_sum;
        }
        __syncthreads();
        if (warp != 0) return;
#pragma unroll
        for (int w = 1; w < kNWarps; ++w) {
            Float4 acc[kVectors];
#pragma unroll
            for (int v = 0; v < kVectors; ++v) acc[v] = states[w].acc[v][lane];
            const float m = merge.raise(states[w].row_max);
            merge.add(exp2f(states[w].row_max - m), states[w].row_sum, acc);
        }
    }

    // ---- O / l and lse ----
    auto* const o_ptr = static_cast<Element*>(tensors.o_ptr) + bidb * tensors.o_batch_stride +
                        bidh * tensors.o_head_stride + query * tensors.o_row_stride;
    const float inverse = inverse_row_sum(merge.row_sum);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int col = 128 * v + 4 * lane;
#pragma unroll
        for (int j = 0; j < 4; ++j) merge.acc[v].x[j] *= inverse;
        store4(o_ptr + col, merge.acc[v], static_cast<int>(problem.head_dim_v) - col,
               problem.aligned16);
    }
    if (lane == 0 && tensors.lse_ptr != nullptr) {
        tensors.lse_ptr[row] = log_sum_exp(merge.row_max, merge.row_sum);
    }
}

}  // namespace fa101::flash_decode
