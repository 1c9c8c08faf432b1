// Host side: tensor maps, tile numbering, the launch.
#pragma once

#include <fa101/error.h>
#include <fa101/params.h>
#include <fa101/plan.h>

#include "common/launch.h"
#include "common/nonce.h"
#include "common/tile_order.h"
#include "flash_attn_sm90/kernel.cuh"
#include "flash_decode/splits.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

namespace fa101::sm90 {

// The driver's encoder, asked of the runtime so that libcuda is never linked.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    static const auto encoder = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &found),
                   "cuTensorMapEncodeTiled");
#else
        check_cuda(
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
            "cuTensorMapEncodeTiled");
#endif
        if (found != cudaDriverEntryPointSuccess) {
            throw CudaError("the driver has no cuTensorMapEncodeTiled; those from CUDA 12.0 on do");
        }
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    return encoder;
}

struct Axis {
    int64_t size, stride;
    int box = 1;
};

// The columns of head_dim and the axes around them for TMA, innermost first; a box has kBox
// columns, swizzled as wgmma reads them. What lies outside arrives as zeros. A miss of L2 fetches
// 128 bytes, as many as a row of the box has (96: 64): with 256 other columns come before the box
// that wants them, and caches of head_dim 128 and 256 were read 7 to 11 % slower.
template <class Element, int kBox, int kAxes>
CUtensorMap make_tensor_map(const char* name, const void* ptr, int64_t head_dim,
                            const Axis (&axes)[kAxes]) {
    cuuint64_t sizes[1 + kAxes] = {static_cast<cuuint64_t>(head_dim)}, strides[kAxes];
    cuuint32_t box[1 + kAxes] = {kBox}, steps[1 + kAxes] = {1};
    for (int i = 0; i < kAxes; ++i) {
        const Axis& axis = axes[i];
        sizes[1 + i] = static_cast<cuuint64_t>(axis.size);
        box[1 + i] = static_cast<cuuint32_t>(axis.box);
        steps[1 + i] = 1;
        // The stride of an axis of one element is never used, but it has to be a legal one.
        const int64_t bytes = axis.size == 1 ? 16 : axis.stride * int64_t{sizeof(Element)};
        strides[i] = static_cast<cuuint64_t>(bytes);
    }
    CUtensorMap map;
    const CUresult status = tensor_map_encoder()(
        &map,
        std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        1 + kAxes, const_cast<void*>(ptr), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        kBox == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw CudaError("cuTensorMapEncodeTiled refuses " + std::string(name) + " (status " +
                        std::to_string(static_cast<int>(status)) + ")");
    }
    return map;
}

template <class Element, int kBox>
CUtensorMap make_kv_map(const char* name, const Problem& problem, const void* ptr, int64_t head_dim,
                        int64_t batch_stride, int64_t head_stride, int64_t row_stride,
                        int box_rows) {
    return make_tensor_map<Element, kBox>(name, ptr, head_dim,
                                          {{problem.seqlen_k, row_stride, box_rows},
                                           {problem.num_heads_kv, head_stride},
                                           {problem.batch, batch_stride}});
}

// Of q or out: a box is box_rows rows of a pack.
template <class Element, int kBox>
CUtensorMap make_q_map(const char* name, const Problem& problem, int packed_heads, const void* ptr,
                       int64_t head_dim, int64_t batch_stride, int64_t head_stride,
                       int64_t row_stride, int box_rows) {
    return make_tensor_map<Element, kBox>(
        name, ptr, head_dim,
        {{packed_heads, head_stride, packed_heads},
         {problem.seqlen_q, row_stride, box_rows / packed_heads},
         {problem.num_heads / packed_heads, packed_heads * head_stride},
         {problem.batch, batch_stride}});
}

template <class Traits>
KernelParams make_kernel_params(const Problem& problem, const Tensors& t, TileCounter* counter,
                                int packed_heads) {
    using Element = typename Traits::Element;
    constexpr int kBox = Traits::kBox;
    KernelParams p;
    p.q_map = make_q_map<Element, kBox>("q", problem, packed_heads, t.q_ptr, problem.head_dim,
                                        t.q_batch_stride, t.q_head_stride, t.q_row_stride,
                                        Traits::kGroupM);
    p.o_map = make_q_map<Element, kBox>("out", problem, packed_heads, t.o_ptr, problem.head_dim_v,
                                        t.o_batch_stride, t.o_head_stride, t.o_row_stride, 16);
    if (problem.seqlen_k > 0) {
        p.k_map =
            make_kv_map<Element, kBox>("k", problem, t.k_ptr, problem.head_dim, t.k_batch_stride,
                                       t.k_head_stride, t.k_row_stride, Traits::kBlockN);
        p.v_map =
            make_kv_map<Element, kBox>("v", problem, t.v_ptr, problem.head_dim_v, t.v_batch_stride,
                                       t.v_head_stride, t.v_row_stride, Traits::kBlockN);
    } else {  // there is no map of nothing, and nothing is loaded
        p.k_map = p.v_map = p.q_map;
    }
    const Problem packed = pack_heads(problem, packed_heads);
    p.t = t;
    p.mask = Mask{problem.seqlen_k, problem.mask_left, problem.mask_right};
    p.num_heads = static_cast<int>(problem.num_heads);
    p.group = Divider::by(problem.group_size());
    p.seqlen_q = static_cast<int>(problem.seqlen_q);
    p.head_dim = static_cast<int>(problem.head_dim);
    p.head_dim_v = static_cast<int>(problem.head_dim_v);
    p.log2_pack = 0;
    while (1 << p.log2_pack < packed_heads) ++p.log2_pack;
    p.num_rows = static_cast<int>(packed.seqlen_q);
    p.num_packs = Divider::by(packed.num_heads);
    p.num_m_blocks = ceil_div(p.num_rows, Traits::kBlockM);
    const int num_batch_packs = static_cast<int>(packed.batch * packed.num_heads);
    p.num_tiles = p.num_m_blocks * num_batch_packs;

    const auto [heads, last_heads] = choose_sections(packed);
    p.num_sections = std::max(num_batch_packs - last_heads, 0) / heads + 1;
    p.section_tiles = Divider::by(heads * p.num_m_blocks);
    p.section_packs = Divider::by(heads);
    p.last_section_packs = Divider::by(num_batch_packs - (p.num_sections - 1) * heads);
    p.counter = counter;
    p.nonce = counter != nullptr ? next_nonce() : 0;

    const float scale = problem.softmax_scale;
    p.has_softcap = problem.softcap > 0;
    if (p.has_softcap) {
        p.logit_factor = scale / problem.softcap;
        p.softmax_scale_log2 = problem.softcap * kLog2e;
    } else {
        p.logit_factor = scale > 0 ? 1.0f : scale < 0 ? -1.0f : 0.0f;
        p.softmax_scale_log2 = scale == 0 ? 1.0f : std::fabs(scale) * kLog2e;
    }
    return p;
}

template <class Traits>
void run_kernel(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
                Stream stream) {
    const auto kernel = flash_attn_sm90_kernel<Traits>;
    TileCounter* counter = nullptr;
    if (!Traits::kSplits && plan.workspace_bytes > 0) {
        counter = static_cast<TileCounter*>(workspace);
    }
    KernelParams p = make_kernel_params<Traits>(problem, tensors, counter, plan.tile.packed_heads);
    if constexpr (Traits::kSplits) {
        const flash_decode::Partials parts =
            flash_decode::make_partials(plan, problem, Traits::kBlockN, workspace);
        p.problem = problem;
        p.num_splits = Divider::by(parts.num_splits);
        p.min_blocks_of_part = min_blocks_of_part(problem, Traits::kBlockN);
        p.num_tiles *= parts.num_splits;
        p.part_o = parts.o, p.part_lse = parts.lse, p.part_stride = parts.o_stride;
    }
    const int num_sms = count_sms(tensors.device_index);
    const int grid =
        Traits::kAtOnce ? p.num_tiles : std::min(p.num_tiles, num_sms * Traits::kBlocksPerSm);
    launch_dependent(/*early=*/Traits::kAtOnce, kernel, "flash_attn_sm90_kernel", grid,
                     Traits::kThreads, Traits::kSmemBytes, stream, p);
}

// The kernel of a tile's head_dims that the plan and the dtype name.
template <int kHeadDim, int kHeadDimV = kHeadDim>
void run_hdim(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
              Stream stream) {
    const auto run = [&](auto element) {
        using Element = decltype(element);
        if (plan.strategy == Strategy::kSplitKV) {
            const bool is_one = plan.tile.block_m == one_group(kHeadDim, kHeadDimV).block_m();
            const auto kernel =
                is_one
                    ? run_kernel<KernelTraits<Element, kHeadDim, kHeadDimV, one_group, false, true>>
                    : run_kernel<
                          KernelTraits<Element, kHeadDim, kHeadDimV, two_groups, false, true>>;
            return kernel(plan, problem, tensors, workspace, stream);
        }
        if (has_extras(problem)) {
            return run_kernel<KernelTraits<Element, kHeadDim, kHeadDimV, two_groups, true>>(
                plan, problem, tensors, workspace, stream);
        }
        if constexpr (kHeadDim == kTwoBlocksHeadDim) {
            if (plan.tile.block_n == kTwins.block_n) {
                return run_kernel<KernelTraits<Element, kHeadDim, kHeadDimV, twins>>(
                    plan, problem, tensors, workspace, stream);
            }
            if (plan.tile.block_n == kAtOnce.block_n && problem.seqlen_k <= kAtOnceKeys) {
                return run_kernel<KernelTraits<Element, kHeadDim, kHeadDimV, at_once>>(
                    plan, problem, tensors, workspace, stream);
            }
        }
        constexpr Config kMost = most_groups(kHeadDim, kHeadDimV);
        if constexpr (kMost.groups > 2) {
            if (plan.tile.block_m == kMost.block_m()) {
                if constexpr (kHeadDim == 64) {
                    if (plan.tile.packed_heads == 1) {
                        using WithHalves =
                            KernelTraits<Element, kHeadDim, kHeadDimV, most_groups,
                                         /*kHasExtras=*/false, /*kSplits=*/false, /*kPacks=*/false>;
                        return run_kernel<WithHalves>(plan, problem, tensors, workspace, stream);
                    }
                }
                return run_kernel<KernelTraits<Element, kHeadDim, kHeadDimV, most_groups>>(
                    plan, problem, tensors, workspace, stream);
            }
        }
        run_kernel<KernelTraits<Element, kHeadDim, kHeadDimV, two_groups>>(plan, problem, tensors,
                                                                           workspace, stream);
    };
    if (problem.dtype_q == DType::kFloat16) {
        run(cutlass::half_t{});
    } else {
        run(cutlass::bfloat16_t{});
    }
}

}  // namespace fa101::sm90
