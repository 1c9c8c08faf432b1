// The oracle on the GPU, so that every element of a large problem can be checked in about a second.
// One block per query row, float64 throughout, no online softmax: the logits are computed twice,
// once for their maximum and once for the weights.
#include "common/bias_mask.h"
#include "common/key_rows.h"
#include "common/launch.h"
#include "common/mask.h"
#include "testing/reference.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

namespace fa101::testing {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChunk = 256;       // weights held in shared memory at a time
constexpr double kHidden = -1.0;  // the weight of a key that the mask hides

__device__ double widen(float x) { return x; }
__device__ double widen(__half x) { return __half2float(x); }
__device__ double widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ double widen(const void* element, DType dtype) {
    return dtype == DType::kFloat32   ? widen(*static_cast<const float*>(element))
           : dtype == DType::kFloat16 ? widen(*static_cast<const __half*>(element))
                                      : widen(*static_cast<const __nv_bfloat16*>(element));
}

template <class Op>
__device__ double warp_reduce(double x, Op op) {
    for (int lane = 16; lane > 0; lane /= 2) x = op(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    reference_kernel(Problem p, Tensors t, double* o, double* lse, int64_t row_step, int64_t rows) {
    extern __shared__ double shared[];
    double* weights = shared;            // kChunk
    double* partial = weights + kChunk;  // kWarps
    double* q = partial + kWarps;        // head_dim
    double* acc = q + p.head_dim;        // head_dim_v

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.x;
    const int64_t i = r % rows * row_step;
    const int64_t h = r / rows % p.num_heads, b = r / rows / p.num_heads;
    const int64_t h_kv = h / (p.num_heads / p.num_heads_kv);
    const T* q_row = static_cast<const T*>(t.q_ptr) + b * t.q_batch_stride + h * t.q_head_stride +
                     i * t.q_row_stride;
    const auto k_row = [&](int64_t j) {
        return static_cast<const T*>(t.k_ptr) + h_kv * t.k_head_stride +
               key_offset(p, t, b, static_cast<int>(j), t.k_batch_stride, t.k_row_stride);
    };
    const auto v_row = [&](int64_t j) {
        return static_cast<const T*>(t.v_ptr) + h_kv * t.v_head_stride +
               key_offset(p, t, b, static_cast<int>(j), t.v_batch_stride, t.v_row_stride);
    };
    const Mask mask = mask_of(p, t, b);
    const BiasMask bias_mask(p, t, b, h);
    const int64_t key_begin = max(int64_t{0}, i + mask.mask_left);
    const int64_t key_end = min(mask.seqlen_k, i + mask.mask_right + 1);

    for (int64_t d = threadIdx.x; d < p.head_dim; d += kThreads) q[d] = widen(q_row[d]);
    for (int64_t d = threadIdx.x; d < p.head_dim_v; d += kThreads) acc[d] = 0;
    __syncthreads();

    const auto add = [](double x, double y) { return x + y; };
    const auto larger = [](double x, double y) { return fmax(x, y); };
    const auto logit = [&](int64_t j) {  // a warp's, one key at a time; every lane gets it
        double dot = 0;
        const T* k = k_row(j);
        for (int64_t d = lane; d < p.head_dim; d += 32) dot += q[d] * widen(k[d]);
        double logit = p.softmax_scale * warp_reduce(dot, add);
        if (p.softcap > 0) logit = p.softcap * tanh(logit / p.softcap);
        if (p.has_bias) logit += widen(bias_mask.bias_at(i, j), p.dtype_bias);
        return logit;
    };

    double row_max = -INFINITY;
    for (int64_t j = key_begin + warp; j < key_end; j += kWarps) {
        if (!bias_mask.hides(i, j)) row_max = fmax(row_max, logit(j));
    }
    if (lane == 0) partial[warp] = row_max;
    __syncthreads();
    row_max = warp_reduce(partial[lane % kWarps], larger);
    if (isinf(row_max) && row_max < 0) row_max = 0;  // -inf - -inf is NaN

    double warp_sum = 0;
    for (int64_t chunk = key_begin; chunk < key_end; chunk += kChunk) {
        const int n = static_cast<int>(min(key_end - chunk, int64_t{kChunk}));
        __syncthreads();  // the last chunk's weights are used up
        for (int j = warp; j < n; j += kWarps) {
            double weight = kHidden;
            if (!bias_mask.hides(i, chunk + j)) {
                weight = exp(logit(chunk + j) - row_max);
                warp_sum += weight;
            }
            if (lane == 0) weights[j] = weight;
        }
        __syncthreads();
        for (int64_t d = threadIdx.x; d < p.head_dim_v; d += kThreads) {
            double sum = acc[d];
            for (int j = 0; j < n; ++j) {
                if (weights[j] == kHidden) continue;
                sum += weights[j] * widen(v_row(chunk + j)[d]);
            }
            acc[d] = sum;
        }
    }
    __syncthreads();
    if (lane == 0) partial[warp] = warp_sum;
    __syncthreads();
    double row_sum = 0;
    for (int w = 0; w < kWarps; ++w) row_sum += partial[w];

    for (int64_t d = threadIdx.x; d < p.head_dim_v; d += kThreads) {
        o[r * p.head_dim_v + d] = acc[d] * (row_sum == 0 ? 0 : 1 / row_sum);
    }
    if (lse != nullptr && threadIdx.x == 0) lse[r] = row_max + log(row_sum);
}

}  // namespace

void reference_attention_gpu(const Problem& problem, const Tensors& tensors, double* o, double* lse,
                             Stream stream, int64_t row_step) {
    const int64_t rows = num_rows(problem, row_step);
    const int64_t grid = problem.batch * problem.num_heads * rows;
    if (grid == 0) return;
    const auto kernel = problem.dtype_q == DType::kFloat32   ? reference_kernel<float>
                        : problem.dtype_q == DType::kFloat16 ? reference_kernel<__half>
                                                             : reference_kernel<__nv_bfloat16>;
    const int64_t doubles = kChunk + kWarps + problem.head_dim + problem.head_dim_v;
    const int smem_bytes = static_cast<int>(doubles * sizeof(double));
    allow_shared_memory(kernel, "reference_kernel", smem_bytes);
    kernel<<<static_cast<unsigned>(grid), kThreads, smem_bytes,
             static_cast<cudaStream_t>(stream)>>>(problem, tensors, o, lse, row_step, rows);
    check_launch("reference_kernel", grid, kThreads, smem_bytes);
}

}  // namespace fa101::testing
