// The host side of fa2: what it supports and how it tiles.
#pragma once

#include "common/cuda_core.h"
#include "common/mask.h"
#include "common/warp_tile.h"
#include "kernel_family.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace fa101::fa2 {

constexpr int kMaxWarps = 4;

// K and V pass through shared memory in chunks of equal size: kDepth columns of K for all keys of a
// step, then as many keys of V, all columns. So the size does not grow with head_dim.
constexpr int kDepth = 32;
constexpr int kStrideK = kDepth + 4;

template <class W>
struct SharedMemory {
    static constexpr int kKeysV = W::kBlockN * kDepth / W::kHeadDim;  // keys of a chunk of V
    static constexpr int kChunk = std::max(W::kBlockN * kStrideK, kKeysV* W::kHeadDim);
    static constexpr int kWarpQ = W::kWarpM * W::kStrideQ;
    static constexpr int kWarpP = W::kWarpM * W::kStrideP;
    static constexpr int bytes(int num_warps) {
        return static_cast<int>(sizeof(float)) * (2 * kChunk + num_warps * (kWarpQ + kWarpP));
    }
};

// Calls run(WarpTile) with the tile for a head_dim. 8 x 8 or 8 x 4 outputs of S and at
// least 8 x 4 of O per thread; up to head_dim 128, two or three blocks of 128 threads fill an SM,
// so that one computes while another waits at a barrier.
template <class Run>
auto dispatch_tile(int64_t head_dim, const Run& run) {
    if (head_dim <= 32) return run(WarpTile<32, 4, 8, 4>{});
    if (head_dim <= 64) return run(WarpTile<64, 4, 8, 8>{});
    if (head_dim <= 128) return run(WarpTile<128, 2, 8, 8>{});
    return run(WarpTile<256, 2, 8, 4>{});
}

// As many warps, each with its own queries, as fit; fewer when there are no queries for them, or
// when smaller tiles are needed to give every SM one.
inline Tile tile(const Problem& p, const DeviceInfo& device) {
    return dispatch_tile(std::max(p.head_dim, p.head_dim_v), [&](auto warp_tile) {
        using W = decltype(warp_tile);
        const auto suits = [&](int num_warps) {
            const int64_t num_tiles = ceil_div<int64_t>(p.seqlen_q, num_warps * W::kWarpM);
            return SharedMemory<W>::bytes(num_warps) <= device.smem_per_block &&
                   (num_warps - 1) * W::kWarpM < p.seqlen_q &&
                   p.batch * p.num_heads * num_tiles >= device.num_sms;
        };
        int num_warps = kMaxWarps;
        while (num_warps > 1 && !suits(num_warps)) --num_warps;
        return Tile{num_warps * W::kWarpM, W::kBlockN, W::kHeadDim, num_warps, /*stages=*/2};
    });
}

inline std::string supports(const Problem& p, const DeviceInfo& device) {
    if (std::string reason = cuda_core_supports(p, device, 256); !reason.empty()) return reason;
    if (std::string reason = refuse_extras(p); !reason.empty()) return reason;
    const int smem_bytes = dispatch_tile(std::max(p.head_dim, p.head_dim_v), [](auto warp_tile) {
        return SharedMemory<decltype(warp_tile)>::bytes(/*num_warps=*/1);
    });
    if (std::string reason = shared_memory_supports(smem_bytes, p, device); !reason.empty()) {
        return reason;
    }
    const int block_m = tile(p, device).block_m;
    return grid_supports(p.batch * p.num_heads * ceil_div<int64_t>(p.seqlen_q, block_m));
}

inline int64_t workspace(const Plan&, const Problem&) { return 0; }

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream);

}  // namespace fa101::fa2
