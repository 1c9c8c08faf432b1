// Host side: tensor maps and the launch.
#pragma once

#include "flash_attn_sm90/launch.cuh"
#include "flash_attn_sm90_split_d/kernel.cuh"

namespace fa101::sm90_split_d {

// The sizes of TMA's boxes and of a tile, by the names that sm90 has for them.
template <class Traits>
struct Sizes {
    using Element = typename Traits::Element;
    static constexpr int kBox = Traits::kBox;
    static constexpr int kGroupM = sm90_split_d::kBlockM;  // of Q
    static constexpr int kBlockN = Traits::kGroupN;        // of K
    static constexpr int kBlockM = Traits::kClusterM;      // of a tile
};

template <class Traits>
KernelParams make_kernel_params(const Problem& problem, const Tensors& t) {
    KernelParams p{sm90::make_kernel_params<Sizes<Traits>>(problem, t, /*counter=*/nullptr,
                                                           /*packed_heads=*/1),
                   0};
    if (problem.seqlen_k > 0) {
        p.v_map = sm90::make_kv_map<typename Traits::Element, Traits::kBox>(
            "v", problem, t.v_ptr, problem.head_dim_v, t.v_batch_stride, t.v_head_stride,
            t.v_row_stride, Traits::kStepK);
    }
    p.num_slices = ceil_div(p.head_dim, Traits::kBox);
    return p;
}

template <class Traits>
void run_kernel(const Problem& problem, const Tensors& tensors, Stream stream) {
    const auto kernel = flash_attn_sm90_split_d_kernel<Traits>;
    const KernelParams p = make_kernel_params<Traits>(problem, tensors);
    const int grid = p.num_tiles * Traits::kCluster;
    allow_shared_memory(kernel, "flash_attn_sm90_split_d_kernel", Traits::kSmemBytes);
    kernel<<<grid, Traits::kThreads, Traits::kSmemBytes, static_cast<cudaStream_t>(stream)>>>(p);
    check_launch("flash_attn_sm90_split_d_kernel", grid, Traits::kThreads, Traits::kSmemBytes);
}

template <int kHeadDim>
void run_hdim(const Problem& problem, const Tensors& tensors, Stream stream) {
    const auto run = [&](auto element) {
        using Element = decltype(element);
        if constexpr (!splits_columns(kHeadDim)) {
            if (cluster_size(problem, kHeadDim) == 1) {
                return run_kernel<KernelTraits<Element, kHeadDim, 1>>(problem, tensors, stream);
            }
        }
        run_kernel<KernelTraits<Element, kHeadDim, 2>>(problem, tensors, stream);
    };
    if (problem.dtype_q == DType::kFloat16) {
        run(cutlass::half_t{});
    } else {
        run(cutlass::bfloat16_t{});
    }
}

}  // namespace fa101::sm90_split_d
