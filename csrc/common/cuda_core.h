// What the kernels on CUDA cores (naive, fa1, fa2) share on the host; plain C++.
#pragma once

#include <fa101/device_info.h>
#include <fa101/params.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace fa101 {

// The part of supports() that all of them share: "" or the reason.
inline std::string cuda_core_supports(const Problem& p, const DeviceInfo& device,
                                      int64_t max_head_dim) {
    if (device.arch < 75) {
        return "it needs compute capability 7.5 or later; the GPU has sm_" +
               std::to_string(device.arch);
    }
    if (p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("it needs one dtype for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
    const bool value = p.head_dim_v > p.head_dim;
    const int64_t widest = value ? p.head_dim_v : p.head_dim;
    if (widest > max_head_dim) {
        return std::string(value ? "head_dim of v is " : "head_dim is ") + std::to_string(widest) +
               "; it takes up to " + std::to_string(max_head_dim);
    }
    return "";
}

// "" or why a block that needs at least `bytes` of shared memory does not fit the GPU.
inline std::string shared_memory_supports(int64_t bytes, const Problem& p,
                                          const DeviceInfo& device) {
    if (bytes <= device.smem_per_block) return "";
    return "head_dim " + std::to_string(std::max(p.head_dim, p.head_dim_v)) + " takes " +
           std::to_string(bytes) + " bytes of shared memory per block; the GPU has " +
           std::to_string(device.smem_per_block);
}

// "" or why `num_blocks` do not fit the one-dimensional grid.
inline std::string grid_supports(int64_t num_blocks) {
    constexpr int64_t kMaxGrid = 0x7fffffff;
    if (num_blocks <= kMaxGrid) return "";
    return "batch * num_heads * tiles is " + std::to_string(num_blocks) + "; it takes up to " +
           std::to_string(kMaxGrid);
}

}  // namespace fa101
