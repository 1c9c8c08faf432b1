// Lesson 1. FlashAttention-1 (Dao et al. 2022, arXiv 2205.14135, Algorithm 1) on CUDA cores.
//
//     for each block of keys:                        K and V stay in shared memory
//         for each tile of queries:                  shared out over the warps of the block
//             read Q, O, m, l
//             S = Q K^T      m, P, l, O: online softmax      O += P V
//             write O / l, m, l
//
// S never reaches memory: the online softmax (common/online_softmax.h) makes one pass over the keys
// enough. But with the keys outside, a query's O, m and l must wait in memory while the other
// queries pass, and every block of keys reads, rescales and writes them again.
//
// Memory traffic: per query and block of kBlockN keys, Q and O read and O written: 12 bytes per
// column of head_dim, against 4 * kBlockN flops. 256 keys (head_dim 64 in 227 KB of shared memory)
// make 85 flops per byte, where S and P alone held naive to 16. All of it is bought with shared
// memory: half the keys, twice the trips of O.
//
// Parallelism is the other price: O may not be updated by two blocks at once, so a thread block
// owns a head, as in the paper, and batch * num_heads of them must fill the device. On 132 SMs 128
// do; 16 (one sequence of 16 k tokens, 16 heads) leave 7 of 8 SMs idle, and naive, with a block per
// tile, overtakes.
//
// Next rung (fa2): swap the loops.
#include "common/dispatch.h"
#include "common/launch.h"
#include "common/warp_tile.cuh"
#include "flash_attn_1.h"

#include <cstdint>

namespace fa101::fa1 {
namespace {

template <class T, class W>
__global__ void __launch_bounds__(32 * kMaxWarps<W>)
    flash_attn_1_kernel(const __grid_constant__ Problem p, const __grid_constant__ Tensors t,
                        float* accum, int block_n) {
    using Shared = SharedMemory<W>;
    using Accum = Accumulators<W>;
    const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int lane_m = W::lane_m(lane), lane_n = W::lane_n(lane);
    const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
    const int head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v);
    const int depth = ceil_div(head_dim, 4) * 4;
    const float softmax_scale_log2 = p.softmax_scale * kLog2e;
    const Head<T> h(p, t, blockIdx.x);
    const Mask mask{p.seqlen_k, p.mask_left, p.mask_right};
    T* const o_out = h.o + 4 * lane_n;             // this lane's first column of the output
    const int num_cols = head_dim_v - 4 * lane_n;  // and what is there from it on

    float* const head_accum = accum + blockIdx.x * Accum::floats(seqlen_q);

    extern __shared__ float4 shared[];
    float* const sK = reinterpret_cast<float*>(shared);
    float* const sV = sK + block_n * Shared::kStrideK;
    float* const sQ = sV + block_n * W::kHeadDim + warp * Shared::kWarp;
    float* const sP = sQ + Shared::kWarpQ;

    for (int n_begin = 0; n_begin == 0 || n_begin < seqlen_k; n_begin += block_n) {
        __syncthreads();  // the previous block of keys is used up
        copy_tile<1>(sK, Shared::kStrideK, h.k + n_begin * t.k_row_stride, t.k_row_stride, block_n,
                     W::kHeadDim, seqlen_k - n_begin, head_dim, p.aligned16, threadIdx.x,
                     blockDim.x);
        copy_tile<1>(sV, W::kHeadDim, h.v + n_begin * t.v_row_stride, t.v_row_stride, block_n,
                     W::kHeadDim, seqlen_k - n_begin, head_dim_v, p.aligned16, threadIdx.x,
                     blockDim.x);
        cp_async_wait();
        __syncthreads();

        // A tile always comes to the same warp, which so finds what it wrote.
        for (int m_begin = warp * W::kWarpM; m_begin < seqlen_q; m_begin += num_warps * W::kWarpM) {
            const int row = m_begin + lane_m;
            const int keys_full = mask.key_end(m_begin);
            const int keys_end = mask.key_end(min(m_begin + W::kWarpM, seqlen_q) - 1);
            if (n_begin > 0 && n_begin >= keys_end) continue;
            const bool is_last = n_begin + block_n >= keys_end;

            copy_tile<1>(sQ, W::kStrideQ, h.q + m_begin * t.q_row_stride, t.q_row_stride, W::kWarpM,
                         W::kHeadDim, seqlen_q - m_begin, head_dim, p.aligned16, lane, 32);
            float* const m = head_accum + m_begin * Accum::kRow + lane_m;
            float* const l = m + W::kWarpM;
            Float4* const o_accum = reinterpret_cast<Float4*>(l - lane_m + W::kWarpM) + lane;
            float o[W::kRows][W::kCols] = {};
            float row_max[W::kRows], row_sum[W::kRows];
#pragma unroll
            for (int i = 0; i < W::kRows; ++i) {
                row_max[i] = -INFINITY, row_sum[i] = 0;
                if (n_begin == 0) continue;
                const float sum = l[W::kLanesM * i];
                row_max[i] = m[W::kLanesM * i];
                row_sum[i] = lane_n == 0 ? sum : 0;  // each lane of the row holds a share
#pragma unroll
                for (int c = 0; c < W::kCols; c += 4) {
                    const Float4 o4 = o_accum[8 * (i * W::kCols + c)];
#pragma unroll
                    for (int y = 0; y < 4; ++y) o[i][c + y] = o4.x[y] * sum;
                }
            }
            cp_async_wait();
            __syncwarp();

            for (int n = n_begin; n < min(n_begin + block_n, keys_end); n += W::kBlockN) {
                const float* const k = sK + (n - n_begin + lane_n) * Shared::kStrideK;
                const float* const v = sV + (n - n_begin) * W::kHeadDim + 4 * lane_n;
                const float* const p_read = sP + lane_m * W::kStrideP;
                float s[W::kRows][W::kKeys] = {};
                multiply_qk<W, Shared::kStrideK>(s, sQ + lane_m * W::kStrideQ, k, depth);
                scale_scores<W>(s, softmax_scale_log2);
                const bool is_full = n + W::kBlockN <= keys_full;
                if (!is_full) mask_scores<W>(s, mask, row, n + lane_n);
                softmax_step<W>(s, row_max, row_sum, o, sP + lane_m * W::kStrideP + lane_n);
                __syncwarp();
                if (is_full) {
                    multiply_pv<W>(o, p_read, v, W::kBlockN);
                } else {
                    multiply_pv_masked<W>(o, p_read, v, W::kBlockN, mask, row, n);
                }
                __syncwarp();  // P is used up
            }

#pragma unroll
            for (int i = 0; i < W::kRows; ++i) {
                const int r = row + W::kLanesM * i;
                const float sum = row_reduce<W>(row_sum[i], [](float a, float b) { return a + b; });
                const float scale = inverse_row_sum(sum);
#pragma unroll
                for (int c = 0; c < W::kCols; c += 4) {
                    Float4 o4;
#pragma unroll
                    for (int y = 0; y < 4; ++y) o4.x[y] = o[i][c + y] * scale;
                    if (!is_last) {
                        o_accum[8 * (i * W::kCols + c)] = o4;
                    } else if (r < seqlen_q) {
                        store4(o_out + r * t.o_row_stride + W::kLanesN * c, o4,
                               num_cols - W::kLanesN * c, p.aligned16);
                    }
                }
                if (lane_n != 0) continue;
                if (!is_last) {
                    m[W::kLanesM * i] = row_max[i], l[W::kLanesM * i] = sum;
                } else if (t.lse_ptr != nullptr && r < seqlen_q) {
                    t.lse_ptr[static_cast<int64_t>(blockIdx.x) * seqlen_q + r] =
                        log_sum_exp(row_max[i], sum);
                }
            }
        }
    }
}

}  // namespace

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream) {
    dispatch_dtype(problem.dtype_q, [&](auto type) {
        dispatch_tile(plan.tile.head_dim, [&](auto warp_tile) {
            using T = typename decltype(type)::Type;
            using W = decltype(warp_tile);
            const auto kernel = flash_attn_1_kernel<T, W>;
            const int64_t grid = problem.batch * problem.num_heads;
            const int threads = 32 * plan.tile.num_warps;
            const int smem_bytes = SharedMemory<W>::bytes(plan.tile.block_n, plan.tile.num_warps);
            allow_shared_memory(kernel, "flash_attn_1_kernel", smem_bytes);
            kernel<<<static_cast<unsigned>(grid), threads, smem_bytes,
                     static_cast<cudaStream_t>(stream)>>>(
                problem, tensors, static_cast<float*>(workspace), plan.tile.block_n);
            check_launch("flash_attn_1_kernel", grid, threads, smem_bytes);
        });
    });
}

}  // namespace fa101::fa1
