// The host side of fa1: what it supports, how it tiles and the memory it asks for.
#pragma once

#include "common/cuda_core.h"
#include "common/mask.h"
#include "common/warp_tile.h"
#include "kernel_family.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace fa101::fa1 {

// One block runs on an SM, so it should have warps enough to hide latencies; but each takes memory
// from the keys.
template <class W>
constexpr int kMaxWarps = W::kHeadDim <= 64 ? 12 : 8;

template <class W>
struct SharedMemory {
    static constexpr int kStrideK = W::kHeadDim + 4;
    static constexpr int kKey = kStrideK + W::kHeadDim;  // floats of a key's k and v
    static constexpr int kWarpQ = W::kWarpM * W::kStrideQ;
    static constexpr int kWarp = kWarpQ + W::kWarpM * W::kStrideP;  // of a warp's Q and P
    static constexpr int bytes(int block_n, int num_warps) {
        return static_cast<int>(sizeof(float)) * (block_n * kKey + num_warps * kWarp);
    }
};

// What the paper keeps in memory between blocks of keys, in float32: for each warp tile m, l and O.
// O lies in the order of the lanes that own it, so a warp reads and writes it in full lines.
template <class W>
struct Accumulators {
    static constexpr int64_t kRow = 2 + W::kHeadDim;
    static FA101_HOST_DEVICE int64_t floats(int64_t seqlen_q) {
        return ceil_div<int64_t>(seqlen_q, W::kWarpM) * W::kWarpM * kRow;
    }
};

// Calls run(WarpTile) with the tile for a head_dim. The keys of a tile are only a strip of the
// block that shared memory holds; narrow strips leave the choice of the block's size free.
template <class Run>
auto dispatch_tile(int64_t head_dim, const Run& run) {
    if (head_dim <= 32) return run(WarpTile<32, 4, 4, 4>{});
    if (head_dim <= 64) return run(WarpTile<64, 4, 4, 4>{});
    if (head_dim <= 128) return run(WarpTile<128, 4, 4, 4>{});
    return run(WarpTile<256, 4, 4, 2>{});
}

// As many keys as fit beside the warps' own memory (the paper's Bc = M / 4d), in whole strips: O
// passes through memory once per block of keys. Fewer warps where not even one strip fits.
inline Tile tile(const Problem& p, const DeviceInfo& device) {
    constexpr int kMaxBlockN = 256;
    return dispatch_tile(std::max(p.head_dim, p.head_dim_v), [&](auto warp_tile) {
        using W = decltype(warp_tile);
        using Shared = SharedMemory<W>;
        int num_warps = kMaxWarps<W>;
        while (num_warps > 1 && Shared::bytes(W::kBlockN, num_warps) > device.smem_per_block) {
            num_warps /= 2;
        }
        const int64_t room = device.smem_per_block - Shared::bytes(0, num_warps);
        const int64_t strips = room / Shared::bytes(W::kBlockN, 0);
        const int64_t needed = std::max<int64_t>(ceil_div<int64_t>(p.seqlen_k, W::kBlockN), 1);
        const int64_t block_n =
            W::kBlockN * std::min({strips, needed, int64_t{kMaxBlockN / W::kBlockN}});
        return Tile{W::kWarpM * num_warps, static_cast<int>(block_n), W::kHeadDim, num_warps,
                    /*stages=*/1};
    });
}

inline std::string supports(const Problem& p, const DeviceInfo& device) {
    if (std::string reason = cuda_core_supports(p, device, 256); !reason.empty()) return reason;
    if (std::string reason = refuse_extras(p); !reason.empty()) return reason;
    const int smem_bytes = dispatch_tile(std::max(p.head_dim, p.head_dim_v), [](auto warp_tile) {
        using W = decltype(warp_tile);
        return SharedMemory<W>::bytes(W::kBlockN, /*num_warps=*/1);
    });
    if (std::string reason = shared_memory_supports(smem_bytes, p, device); !reason.empty()) {
        return reason;
    }
    return grid_supports(p.batch * p.num_heads);
}

inline int64_t workspace(const Plan& plan, const Problem& p) {
    return dispatch_tile(plan.tile.head_dim, [&](auto warp_tile) {
        return p.batch * p.num_heads * Accumulators<decltype(warp_tile)>::floats(p.seqlen_q) *
               static_cast<int64_t>(sizeof(float));
    });
}

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream);

}  // namespace fa101::fa1
