// The merge as a kernel of its own, for the families whose kernels do not merge (merge.cuh): of
// float32, of wide heads and of sm90. For each row, over the parts i that saw any key,
//
//     m = max lse_i      l = sum_i 2^(lse_i - m)      O = sum_i 2^(lse_i - m) O_i / l
//     lse = m + log2 l   (to base 2 until here)
//
// exact, because every part is normalised by its own lse. Parts without keys have lse = -inf,
// weight exactly 0 and an O that is not read.
//
// A row has few bytes and many of them wait for memory, so all its loads should be on their way at
// once: a warp sums up to 16 parts; with more, 16 warps a row take every 16th part each. Both add
// the same terms in the same order, so a longer cache does not change a bit. Many rows fill the GPU
// with a warp each, whatever the parts. Rows of more than 256 columns are merged in pieces of 256.
#include "common/dependent.cuh"
#include "common/dispatch.h"
#include "common/launch.h"
#include "common/mask.h"
#include "common/memory.cuh"
#include "common/online_softmax.h"
#include "common/warp.cuh"
#include "flash_decode/family.h"

#include <cstdint>

namespace fa101::flash_decode {
namespace {

constexpr int kGroups = 16;  // part i is summed with the parts of the same i % kGroups
constexpr int kBatch = 4;    // loads of a lane at a time
constexpr int64_t kManyRows = 1024;
constexpr int kVectors = kMergeCols / 128;  // of four columns of a lane

// kWarpsPerRow is 1 or kGroups.
template <class T, int kWarpsPerRow, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    combine_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Tensors tensors,
                   const __grid_constant__ Partials partials) {
    __shared__ Float4 shared[kWarpsPerRow][kVectors][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t rows = problem.batch * problem.num_heads * problem.seqlen_q;
    const int num_col_blocks = ceil_div(static_cast<int>(problem.head_dim_v), kMergeCols);
    const int first_col = static_cast<int>(blockIdx.x) % num_col_blocks * kMergeCols + 4 * lane;
    const int64_t row_block = static_cast<int>(blockIdx.x) / num_col_blocks;
    const int64_t row = kWarpsPerRow == 1 ? row_block * kWarps + warp : row_block;
    if (row >= rows) return;
    const int first = kWarpsPerRow == 1 ? 0 : warp;
    const int num_splits = partials.num_splits;
    const float* const lse = partials.lse + row * num_splits;
    const float* const parts = partials.o + row * num_splits * partials.o_stride;
    wait_for_stream();

    float row_max = -INFINITY, row_sum = 0.0f;
    for (int i = lane; i < num_splits; i += 32) row_max = fmaxf(row_max, lse[i]);
    row_max = warp_max(row_max);
    const float m = safe_row_max(row_max);
    for (int i = lane; i < num_splits; i += 32) row_sum += exp2f(lse[i] - m);
    row_sum = warp_sum(row_sum);

    Float4 acc[kVectors] = {};
    for (int i = first; i < num_splits; i += kBatch * kWarpsPerRow) {
        float weight[kBatch];
        Float4 part[kBatch][kVectors] = {};
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int split = i + b * kWarpsPerRow;
            const float part_lse = split < num_splits ? lse[split] : -INFINITY;
            weight[b] = exp2f(part_lse - m);
            if (part_lse == -INFINITY) continue;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int col = first_col + 128 * v;
                if (col < problem.head_dim_v) {
                    part[b][v] =
                        *reinterpret_cast<const Float4*>(parts + split * partials.o_stride + col);
                }
            }
        }
        // Not a fused multiply-add: the sum over warps below cannot be one, and adds the same.
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    acc[v].x[j] = __fadd_rn(acc[v].x[j], __fmul_rn(weight[b], part[b][v].x[j]));
                }
            }
        }
    }

    if constexpr (kWarpsPerRow > 1) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) shared[warp][v][lane] = acc[v];
        __syncthreads();
        if (warp != 0) return;
#pragma unroll
        for (int w = 1; w < kWarpsPerRow; ++w) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[v].x[j] += shared[w][v][lane].x[j];
            }
        }
    }

    const int64_t query = row % problem.seqlen_q, batch_head = row / problem.seqlen_q;
    const int64_t bidb = batch_head / problem.num_heads, bidh = batch_head % problem.num_heads;
    T* const o_ptr = static_cast<T*>(tensors.o_ptr) + bidb * tensors.o_batch_stride +
                     bidh * tensors.o_head_stride + query * tensors.o_row_stride;
    const float inverse = inverse_row_sum(row_sum);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int col = first_col + 128 * v;
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[v].x[j] *= inverse;
        store4(o_ptr + col, acc[v], static_cast<int>(problem.head_dim_v) - col, problem.aligned16);
    }
    if (first_col == 0 && tensors.lse_ptr != nullptr) {
        tensors.lse_ptr[row] = log_sum_exp(row_max, row_sum);
    }
}

template <class T, int kWarpsPerRow, int kWarps>
void launch_combine(const Problem& problem, const Tensors& tensors, const Partials& partials,
                    Stream stream) {
    const auto kernel = combine_kernel<T, kWarpsPerRow, kWarps>;
    const int64_t rows = problem.batch * problem.num_heads * problem.seqlen_q;
    const int64_t grid = ceil_div<int64_t>(rows, kWarps / kWarpsPerRow) *
                         ceil_div<int64_t>(problem.head_dim_v, kMergeCols);
    launch_dependent(/*early=*/true, kernel, "combine_kernel", grid, 32 * kWarps, 0, stream,
                     problem, tensors, partials);
}

template <class T>
void run_typed(const Problem& problem, const Tensors& tensors, const Partials& partials,
               Stream stream) {
    const int64_t rows = problem.batch * problem.num_heads * problem.seqlen_q;
    if (partials.num_splits <= kGroups || rows >= kManyRows) {
        launch_combine<T, 1, 4>(problem, tensors, partials, stream);
    } else {
        launch_combine<T, kGroups, kGroups>(problem, tensors, partials, stream);
    }
}

}  // namespace

void run_combine(const Problem& problem, const Tensors& tensors, const Partials& partials,
                 Stream stream) {
    dispatch_dtype(problem.dtype_o, [&](auto type) {
        run_typed<typename decltype(type)::Type>(problem, tensors, partials, stream);
    });
}

}  // namespace fa101::flash_decode
