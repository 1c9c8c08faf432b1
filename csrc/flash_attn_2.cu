// Lesson 2. FlashAttention-2 on CUDA cores (Dao 2023, arXiv 2307.08691).
//
//     for each tile of queries, in parallel:            grid = query tiles x heads x batch
//         for each block of keys:
//             S = Q K^T      m, P, l, O: online softmax      O += P V
//         write O / l and lse, once
//
// fa1 with the loops swapped. A query tile now owns its O, m and l for the whole loop, so they live
// in registers and go to memory once, already normalised; and tiles do not depend on each other, so
// long sequences fill the device even at batch 1.
//
// Memory traffic: Q and O once; K and V once per query tile, (head_dim + head_dim_v) * 4 bytes per
// key and tile of kBlockM queries, against kBlockM * (head_dim + head_dim_v) * 2 flops: kBlockM / 2
// flops per byte, 64 for 128 queries. 30 TFLOP/s then take under 0.5 TB/s, mostly from the L2
// cache: no longer the limit. What is left is arithmetic, and feeding it: see warp_tile.cuh for the
// register tiles and their count of shared memory loads.
//
// K and V come in chunks of 32 columns or of as many keys (flash_attn_2.h), two buffers deep: a
// chunk is copied with cp.async while the one before is multiplied. One barrier per chunk both
// publishes the new chunk and frees the old one. 16-bit inputs, and sm_75, copy through registers.
//
// Next rung (fa2_cute): the same loop on tensor cores, an order of magnitude more arithmetic.
#include "common/dispatch.h"
#include "common/launch.h"
#include "common/warp_tile.cuh"
#include "flash_attn_2.h"

#include <cstdint>

namespace fa101::fa2 {
namespace {

template <class T, class W, int kBlocksPerSm>
__global__ void __launch_bounds__(32 * kMaxWarps, kBlocksPerSm)
    flash_attn_2_kernel(const __grid_constant__ Problem p, const __grid_constant__ Tensors t) {
    using Shared = SharedMemory<W>;
    const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int lane_m = W::lane_m(lane), lane_n = W::lane_n(lane);
    const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
    const int head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v);

    // Query tiles that see most keys come first: with a mask the blocks that start last are short.
    const int block_m = num_warps * W::kWarpM;
    const int num_m_blocks = ceil_div(seqlen_q, block_m);
    const int m_begin = (num_m_blocks - 1 - blockIdx.x % num_m_blocks) * block_m;
    const int head = blockIdx.x / num_m_blocks;
    const Head<T> h(p, t, head);

    const Mask mask{p.seqlen_k, p.mask_left, p.mask_right};
    const int n_block_end = mask.n_block_end(min(m_begin + block_m, seqlen_q), W::kBlockN);

    // This warp's queries, the keys that all of them see, and those that any of them sees.
    const int warp_begin = m_begin + warp * W::kWarpM;
    const int warp_end = min(warp_begin + W::kWarpM, seqlen_q);
    const int keys_full = mask.key_end(warp_begin);
    const int keys_end = warp_begin < seqlen_q ? mask.key_end(warp_end - 1) : 0;

    extern __shared__ float4 shared[];
    float* const chunks = reinterpret_cast<float*>(shared);
    float* const sQ = chunks + 2 * Shared::kChunk;
    float* const sP = sQ + num_warps * Shared::kWarpQ + warp * Shared::kWarpP;
    const float* const q = sQ + warp * Shared::kWarpQ + lane_m * W::kStrideQ;
    float* const p_write = sP + lane_m * W::kStrideP + lane_n;
    const float* const p_read = sP + lane_m * W::kStrideP;

    // Chunks [0, num_chunks_k) of a key block are columns of K, those up to num_chunks keys of V.
    const int num_chunks_k = ceil_div(head_dim, kDepth);
    const int num_chunks = num_chunks_k + W::kBlockN / Shared::kKeysV;
    int stage = 0;
    const auto copy_chunk = [&](int n_block, int chunk) {
        const bool is_k = chunk < num_chunks_k;
        const int d_begin = is_k ? chunk * kDepth : 0;
        const int n_begin =
            n_block * W::kBlockN + (is_k ? 0 : (chunk - num_chunks_k) * Shared::kKeysV);
        const int64_t row_stride = is_k ? t.k_row_stride : t.v_row_stride;
        copy_tile<4>(chunks + stage * Shared::kChunk, is_k ? kStrideK : W::kHeadDim,
                     (is_k ? h.k : h.v) + n_begin * row_stride + d_begin, row_stride,
                     is_k ? W::kBlockN : Shared::kKeysV, is_k ? kDepth : W::kHeadDim,
                     seqlen_k - n_begin, (is_k ? head_dim : head_dim_v) - d_begin, p.aligned16,
                     threadIdx.x, blockDim.x);
    };
    // Waits for a chunk, starts the copy of the next into the other buffer, returns the first.
    const auto next_chunk = [&](int n_block, int chunk) {
        cp_async_wait();
        __syncthreads();
        const float* const ready = chunks + stage * Shared::kChunk;
        stage ^= 1;
        if (chunk + 1 < num_chunks) {
            copy_chunk(n_block, chunk + 1);
        } else if (n_block + 1 < n_block_end) {
            copy_chunk(n_block + 1, 0);
        }
        return ready;
    };

    float o[W::kRows][W::kCols] = {};
    float row_max[W::kRows], row_sum[W::kRows];
#pragma unroll
    for (int i = 0; i < W::kRows; ++i) row_max[i] = -INFINITY, row_sum[i] = 0;
    const float softmax_scale_log2 = p.softmax_scale * kLog2e;

    copy_tile<4>(sQ, W::kStrideQ, h.q + m_begin * t.q_row_stride, t.q_row_stride, block_m,
                 W::kHeadDim, seqlen_q - m_begin, head_dim, p.aligned16, threadIdx.x, blockDim.x);
    if (n_block_end > 0) copy_chunk(0, 0);

    for (int n_block = 0; n_block < n_block_end; ++n_block) {
        const int n_begin = n_block * W::kBlockN;
        const bool is_seen = n_begin < keys_end;
        const bool is_full = n_begin + W::kBlockN <= keys_full;

        float s[W::kRows][W::kKeys] = {};
        for (int chunk = 0; chunk < num_chunks_k; ++chunk) {
            const float* const k = next_chunk(n_block, chunk) + lane_n * kStrideK;
            const int d_begin = chunk * kDepth;
            const int depth = min(kDepth, ceil_div(head_dim - d_begin, 4) * 4);
            if (is_seen) multiply_qk<W, kStrideK>(s, q + d_begin, k, depth);
        }

        if (is_seen) {
            scale_scores<W>(s, softmax_scale_log2);
            if (!is_full) mask_scores<W>(s, mask, warp_begin + lane_m, n_begin + lane_n);
            softmax_step<W>(s, row_max, row_sum, o, p_write);
            __syncwarp();
        }

        for (int chunk = num_chunks_k; chunk < num_chunks; ++chunk) {
            const float* const v = next_chunk(n_block, chunk) + 4 * lane_n;
            const int key = (chunk - num_chunks_k) * Shared::kKeysV;
            if (!is_seen) continue;
            if (is_full) {
                multiply_pv<W>(o, p_read + key, v, Shared::kKeysV);
            } else {
                multiply_pv_masked<W>(o, p_read + key, v, Shared::kKeysV, mask, warp_begin + lane_m,
                                      n_begin + key);
            }
        }
        __syncwarp();  // P is used up
    }

#pragma unroll
    for (int i = 0; i < W::kRows; ++i) {
        const int row = warp_begin + lane_m + W::kLanesM * i;
        const float sum = row_reduce<W>(row_sum[i], [](float a, float b) { return a + b; });
        if (row >= seqlen_q) continue;
        const float scale = inverse_row_sum(sum);
#pragma unroll
        for (int c = 0; c < W::kCols; c += 4) {
            const int col = 4 * lane_n + W::kLanesN * c;
            Float4 out;
#pragma unroll
            for (int y = 0; y < 4; ++y) out.x[y] = o[i][c + y] * scale;
            store4(h.o + row * t.o_row_stride + col, out, head_dim_v - col, p.aligned16);
        }
        if (t.lse_ptr != nullptr && lane_n == 0) {
            t.lse_ptr[static_cast<int64_t>(head) * seqlen_q + row] = log_sum_exp(row_max[i], sum);
        }
    }
}

}  // namespace

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void*,
            Stream stream) {
    dispatch_dtype(problem.dtype_q, [&](auto type) {
        dispatch_tile(plan.tile.head_dim, [&](auto warp_tile) {
            using T = typename decltype(type)::Type;
            using W = decltype(warp_tile);
            constexpr int kRegistersOfTiles = W::kRows * (W::kKeys + W::kCols);
            constexpr int kBlocksPerSm = kRegistersOfTiles <= 96 ? 3 : 2;
            const auto kernel = flash_attn_2_kernel<T, W, kBlocksPerSm>;
            const int threads = 32 * plan.tile.num_warps;
            const int smem_bytes = SharedMemory<W>::bytes(plan.tile.num_warps);
            const int64_t grid = problem.batch * problem.num_heads *
                                 ceil_div<int64_t>(problem.seqlen_q, plan.tile.block_m);
            allow_shared_memory(kernel, "flash_attn_2_kernel", smem_bytes);
            kernel<<<static_cast<unsigned>(grid), threads, smem_bytes,
                     static_cast<cudaStream_t>(stream)>>>(problem, tensors);
            check_launch("flash_attn_2_kernel", grid, threads, smem_bytes);
        });
    });
}

}  // namespace fa101::fa2
