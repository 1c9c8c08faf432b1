// The host side of naive: what it supports and the memory it asks for.
#pragma once

#include "common/cuda_core.h"
#include "common/mask.h"
#include "kernel_family.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace fa101::naive {

constexpr int kTile = 32;  // outputs of a block, each way; also how deep its operands are staged

inline int64_t heads_of(const Problem& p) { return p.batch * p.num_heads; }
inline int64_t tiles_of(int64_t size) { return ceil_div<int64_t>(size, kTile); }

inline std::string supports(const Problem& p, const DeviceInfo& device) {
    if (std::string reason = cuda_core_supports(p, device, 1024); !reason.empty()) return reason;
    const double rows = static_cast<double>(heads_of(p)) * static_cast<double>(p.seqlen_q);
    const double bytes = rows * static_cast<double>(p.seqlen_k) * sizeof(float);
    const double memory = device.memory_bytes > 0 ? static_cast<double>(device.memory_bytes) : 1e15;
    if (bytes > memory) {
        return "the matrix S takes " + std::to_string(bytes / 1e9) + " GB; the GPU has " +
               std::to_string(memory / 1e9);
    }
    const int64_t tiles = std::max(tiles_of(p.seqlen_k), tiles_of(p.head_dim_v));
    return grid_supports(heads_of(p) * std::max(p.seqlen_q, tiles_of(p.seqlen_q) * tiles));
}

inline Tile tile(const Problem& p, const DeviceInfo&) {
    const auto head_dim = static_cast<int>(std::max(p.head_dim, p.head_dim_v));
    return {kTile, kTile, head_dim, kTile * kTile / 32, /*stages=*/1};
}

inline int64_t workspace(const Plan&, const Problem& p) {
    return heads_of(p) * p.seqlen_q * p.seqlen_k * static_cast<int64_t>(sizeof(float));
}

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream);

}  // namespace fa101::naive
