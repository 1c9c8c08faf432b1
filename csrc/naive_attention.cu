// Lesson 0. Attention as the textbook writes it, one kernel per line:
//
//     S = softmax_scale * Q K^T           scores_kernel     S x S floats, written to memory
//     P = softmax(S), row by row          softmax_kernel    read, written in place
//     O = P V                             output_kernel     read
//
// Memory traffic: 16 bytes per (query, key) pair for S and P alone: written 4, read 4 and written 4
// by the softmax (its second and third look at a row hit the cache), read 4. Batch 4, 32 heads and
// 4096 tokens make S 8.6 GB, and 34 GB pass through memory, while Q, K, V and O are 0.5 GB
// together; doubling the sequence quadruples it. Beyond that the two products read Q, K, P and V
// from the cache once per 32 x 32 tile of their result.
//
// Arithmetic: a thread computes one output, so every multiply-add waits for a load of its own from
// shared memory (the other operand is the same for a whole warp and comes four at a time). An SM
// serves one such load per clock, 32 lanes, where it could do 128 multiply-adds: a quarter of the
// peak is out of reach.
//
// Next rung (fa1): never write S. fa2 then gives each thread enough outputs to keep it busy.
#include "common/bias_mask.h"
#include "common/dispatch.h"
#include "common/launch.h"
#include "common/memory.cuh"
#include "common/online_softmax.h"
#include "naive_attention.h"

#include <cstdint>

namespace fa101::naive {
namespace {

constexpr int kSoftmaxThreads = 256;

// S in base-2 logits, so that the softmax can use exp2. Block = 32 x 32 outputs of one head,
// neighbouring threads neighbouring keys. What is outside a query's bounds is not written; a key
// inside that the mask hides gets -inf. kHasExtras: softcap, bias or mask; without them 32
// registers do, and a multiprocessor holds two blocks.
template <class T, bool kHasExtras>
__global__ void __launch_bounds__(kTile* kTile)
    scores_kernel(const __grid_constant__ Problem p, const __grid_constant__ Tensors t, float* s) {
    // One column of padding: threads that read down a column of K hit different banks.
    __shared__ float sQ[kTile][kTile], sK[kTile][kTile + 1];
    const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
    const int head_dim = static_cast<int>(p.head_dim);
    const int num_tiles_n = ceil_div(seqlen_k, kTile), num_tiles_m = ceil_div(seqlen_q, kTile);
    const int n_begin = blockIdx.x % num_tiles_n * kTile;
    const int m_begin = blockIdx.x / num_tiles_n % num_tiles_m * kTile;
    const int head = blockIdx.x / num_tiles_n / num_tiles_m;
    const int bidb = head / static_cast<int>(p.num_heads),
              bidh = head % static_cast<int>(p.num_heads);
    const Head<T> h(p, t, head);
    const Mask mask = mask_of(p, t, bidb);
    if (n_begin >= mask.key_end(min(m_begin + kTile, seqlen_q) - 1) ||
        n_begin + kTile <= mask.key_begin(m_begin)) {
        return;  // nobody sees it
    }

    const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
    const int row = m_begin + y, key = n_begin + x;
    float sum = 0;
    for (int d_begin = 0; d_begin < head_dim; d_begin += kTile) {
        const int d = d_begin + x, key_loaded = n_begin + y;
        const bool has_q = row < seqlen_q && d < head_dim;
        const bool has_k = key_loaded < seqlen_k && d < head_dim;
        sQ[y][x] = has_q ? to_float(h.q[row * t.q_row_stride + d]) : 0.0f;
        sK[y][x] = has_k ? to_float(h.k[key_loaded * t.k_row_stride + d]) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kTile; ++i) sum += sQ[y][i] * sK[x][i];
        __syncthreads();
    }
    if (row < seqlen_q && mask.sees_key(row, key)) {
        const int64_t s_row = static_cast<int64_t>(head) * seqlen_q + row;
        float logit = sum * p.softmax_scale;
        if constexpr (kHasExtras) {
            const BiasMask bias_mask(p, t, bidb, bidh);
            if (p.softcap > 0) logit = p.softcap * tanhf(logit / p.softcap);
            logit *= kLog2e;
            if (bias_mask.bias != nullptr) {
                logit += base2_bias(to_float(bias_mask.bias_at(row, key), p.dtype_bias));
            }
            if (bias_mask.hides(row, key)) logit = -INFINITY;
        }
        s[s_row * seqlen_k + key] = kHasExtras ? logit : logit * kLog2e;
    }
}

// op over the block; every thread gets the result.
template <class Op>
__device__ float block_reduce(float x, Op op) {
    __shared__ float partial[kSoftmaxThreads / 32];
    for (int bit = 16; bit > 0; bit /= 2) x = op(x, __shfl_xor_sync(~0u, x, bit));
    __syncthreads();  // `partial` of the call before is used up
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float result = partial[0];
    for (int warp = 1; warp < kSoftmaxThreads / 32; ++warp) result = op(result, partial[warp]);
    return result;
}

// S becomes P, one block per row.
__global__ void __launch_bounds__(kSoftmaxThreads)
    softmax_kernel(const __grid_constant__ Problem p, const __grid_constant__ Tensors t, float* s) {
    const int row = blockIdx.x % static_cast<int>(p.seqlen_q);
    const Mask mask = mask_of(p, t, blockIdx.x / p.seqlen_q / p.num_heads);
    const int begin = mask.key_begin(row) + threadIdx.x, end = mask.key_end(row);
    float* const s_row = s + blockIdx.x * p.seqlen_k;

    float row_max = -INFINITY;
    for (int j = begin; j < end; j += kSoftmaxThreads) {
        row_max = fmaxf(row_max, s_row[j]);
    }
    row_max = block_reduce(row_max, [](float a, float b) { return fmaxf(a, b); });

    const float shift = safe_row_max(row_max);
    float row_sum = 0;
    for (int j = begin; j < end; j += kSoftmaxThreads) {
        row_sum += exp2f(s_row[j] - shift);
    }
    row_sum = block_reduce(row_sum, [](float a, float b) { return a + b; });

    const float scale = inverse_row_sum(row_sum);
    for (int j = begin; j < end; j += kSoftmaxThreads) {
        s_row[j] = exp2f(s_row[j] - shift) * scale;
    }
    if (t.lse_ptr != nullptr && threadIdx.x == 0) {
        t.lse_ptr[blockIdx.x] = log_sum_exp(row_max, row_sum);
    }
}

// Block = 32 queries x 32 columns of one head. A row sums over the keys it sees and no others: the
// rest of P was never written, and their V may be NaN. Keys that the mask hides are marked by a
// weight of -1. kHasHoles: there is a mask, or a window starts after key 0.
template <class T, bool kHasHoles>
__global__ void __launch_bounds__(kTile* kTile, kHasHoles ? 1 : 2)
    output_kernel(const __grid_constant__ Problem p, const __grid_constant__ Tensors t,
                  const float* probs) {
    __shared__ float sP[kTile][kTile], sV[kTile][kTile];
    const int seqlen_q = static_cast<int>(p.seqlen_q), head_dim_v = static_cast<int>(p.head_dim_v);
    const int num_tiles_d = ceil_div(head_dim_v, kTile), num_tiles_m = ceil_div(seqlen_q, kTile);
    const int d_begin = blockIdx.x % num_tiles_d * kTile;
    const int m_begin = blockIdx.x / num_tiles_d % num_tiles_m * kTile;
    const int head = blockIdx.x / num_tiles_d / num_tiles_m;
    const Head<T> h(p, t, head);
    const int bidb = head / static_cast<int>(p.num_heads),
              bidh = head % static_cast<int>(p.num_heads);
    const Mask mask = mask_of(p, t, bidb);

    const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
    const int row = m_begin + y, d = d_begin + x;
    // Keys of the block, and those that this row sees, count from the next 32 on.
    const int block_begin = kHasHoles ? mask.key_begin(m_begin) / kTile * kTile : 0;
    const int block_end = mask.key_end(min(m_begin + kTile, seqlen_q) - 1);
    int begin = kHasHoles && row < seqlen_q ? mask.key_begin(row) - block_begin : 0;
    int end = row < seqlen_q ? mask.key_end(row) - block_begin : 0;
    const float* p_next =
        probs + (static_cast<int64_t>(head) * seqlen_q + row) * p.seqlen_k + block_begin + x;
    const T* v_next = h.v + (block_begin + y) * t.v_row_stride + d;
    float sum = 0;
    for (int left = block_end - block_begin; left > 0; left -= kTile) {
        const bool sees = begin <= x && x < end;
        sP[y][x] = sees ? *p_next : 0.0f;
        if constexpr (kHasHoles) {
            const int key = block_end - left + x;
            if (sees && BiasMask(p, t, bidb, bidh).hides(row, key)) sP[y][x] = -1.0f;
        }
        sV[y][x] = y < left && d < head_dim_v ? to_float(*v_next) : 0.0f;
        p_next += kTile, v_next += kTile * t.v_row_stride;
        __syncthreads();
#pragma unroll 8
        for (int j = max(0, begin); j < min(kTile, end); ++j) {
            if (kHasHoles && sP[y][j] == -1.0f) continue;
            sum += sP[y][j] * sV[j][x];
        }
        begin -= kTile, end -= kTile;
        __syncthreads();
    }
    if (row < seqlen_q && d < head_dim_v) h.o[row * t.o_row_stride + d] = from_float<T>(sum);
}

}  // namespace

void launch(const Plan&, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    float* const s = static_cast<float*>(workspace);
    const int64_t rows = heads_of(problem) * problem.seqlen_q;
    const int64_t tiles_m = heads_of(problem) * tiles_of(problem.seqlen_q);
    constexpr int kThreads = kTile * kTile;
    dispatch_dtype(problem.dtype_q, [&](auto type) {
        using T = typename decltype(type)::Type;
        if (const int64_t grid = tiles_m * tiles_of(problem.seqlen_k); grid > 0) {
            const bool has_extras = problem.softcap > 0 || problem.has_bias || problem.has_mask;
            const auto kernel = has_extras ? scores_kernel<T, true> : scores_kernel<T, false>;
            kernel<<<static_cast<unsigned>(grid), kThreads, 0, cuda_stream>>>(problem, tensors, s);
            check_launch("scores_kernel", grid, kThreads, 0);
        }
        softmax_kernel<<<static_cast<unsigned>(rows), kSoftmaxThreads, 0, cuda_stream>>>(
            problem, tensors, s);
        check_launch("softmax_kernel", rows, kSoftmaxThreads, 0);
        const int64_t grid = tiles_m * tiles_of(problem.head_dim_v);
        const bool has_holes = problem.has_mask || problem.has_left_bound();
        const auto kernel = has_holes ? output_kernel<T, true> : output_kernel<T, false>;
        kernel<<<static_cast<unsigned>(grid), kThreads, 0, cuda_stream>>>(problem, tensors, s);
        check_launch("output_kernel", grid, kThreads, 0);
    });
}

}  // namespace fa101::naive
