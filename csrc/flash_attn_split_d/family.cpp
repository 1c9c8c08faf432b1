#include "flash_attn_split_d/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/mask.h"
#include "flash_attn_split_d/tile_config.h"
#include "flash_attn_split_d_tf32/family.h"
#include "flash_decode/splits.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace fa101::split_d {
namespace {

int64_t num_blocks(const Problem& p, const TileConfig& tile) {
    return p.batch * p.num_heads * ceil_div<int64_t>(p.seqlen_q, tile.block_m);
}

// What the query tiles take, in rows that a multiprocessor works through one after the other: it
// holds one block. A block of 32 queries reads as many keys as one of 64, so it takes more than
// half the time; few keys a step cost some, too.
int64_t cost(const Problem& p, const DeviceInfo& device, const TileConfig& tile) {
    const int64_t waves = ceil_div<int64_t>(num_blocks(p, tile), std::max(device.num_sms, 1));
    return waves * (tile.block_m + 8) * (64 + 8 * (tile.block_n < 32) + 64 * (tile.stages == 1));
}

// The cheapest tile for the smallest head_dim that holds q, k and v, in at most `smem_bytes`; null:
// none does.
const TileConfig* find_tile(const Problem& p, const DeviceInfo& device, int64_t smem_bytes) {
    const TileConfig* best = nullptr;
    for (const TileConfig& tile : kTiles) {
        if (std::max(p.head_dim, p.head_dim_v) > tile.head_dim) continue;
        if (best != nullptr && best->head_dim != tile.head_dim) break;
        if (tile.smem_bytes() > smem_bytes) continue;
        if (best == nullptr || cost(p, device, tile) < cost(p, device, *best)) best = &tile;
    }
    return best;
}

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_CUTE_ARCHS) > 1 && is_compiled(256);

}  // namespace

// float32 has a kernel of its own, of three TF32 products.
std::string supports(const Problem& p, const DeviceInfo& device) {
    if (p.dtype_q == DType::kFloat32) return split_d_tf32::supports(p, device);
    if (device.arch < 80) {
        return "it needs sm_80 or later (cp.async, mma.m16n8k16); the GPU has sm_" +
               std::to_string(device.arch);
    }
    if (p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("it needs one dtype for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
    const int64_t widest = std::max(p.head_dim, p.head_dim_v);
    if (widest <= 256) {
        return "head_dim is " + std::to_string(widest) + "; split_q serves up to 256";
    }
    if (widest > kMaxHeadDim) {
        return "head_dim is " + std::to_string(widest) + "; it takes up to " +
               std::to_string(kMaxHeadDim);
    }
    if (!is_compiled(256)) {
        return "head_dim is " + std::to_string(widest) +
               "; tiles over 256 are in builds that have 256 (FA101_HEAD_DIMS)";
    }
    const TileConfig* const tile = find_tile(p, device, device.smem_per_block);
    if (tile == nullptr) {
        return "its tiles for head_dim " + std::to_string(widest) + " need more than the " +
               std::to_string(device.smem_per_block) + " bytes of shared memory a block has";
    }
    return flash_decode::refuse_grid(p, num_blocks(p, *tile) * splits(p, device).count);
}

Tile tile(const Problem& p, const DeviceInfo& device) {
    if (p.dtype_q == DType::kFloat32) return split_d_tf32::tile(p, device);
    const TileConfig& tile = *find_tile(p, device, device.smem_per_block);
    return {tile.block_m, tile.block_n, tile.head_dim, kNumWarps, tile.stages};
}

Splits splits(const Problem& p, const DeviceInfo& device) {
    if (p.dtype_q == DType::kFloat32) return split_d_tf32::splits(p, device);
    const TileConfig& tile = *find_tile(p, device, device.smem_per_block);
    return flash_decode::splits_if_idle(p, num_blocks(p, tile), flash_decode::Slots::of(device, 1),
                                        tile.block_n);
}

int64_t workspace(const Plan& plan, const Problem& p) {
    return flash_decode::partials_bytes(plan, p);
}

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream) {
    const Partials partials =
        flash_decode::make_partials(plan, problem, plan.tile.block_n, workspace);
    [[maybe_unused]] const auto run = [&](auto run_hdim) {
        run_hdim(plan, problem, tensors, partials, stream);
        if (plan.num_splits > 1) flash_decode::run_combine(problem, tensors, partials, stream);
    };
    if constexpr (kIsBuilt) {
        if (problem.dtype_q == DType::kFloat32) return run(split_d_tf32::run);
        switch (plan.tile.head_dim) {
            case 320:
                return run(run_hdim320);
            case 384:
                return run(run_hdim384);
            case 512:
                return run(run_hdim512);
            case 640:
                return run(run_hdim640);
            case 768:
                return run(run_hdim768);
            case 1024:
                return run(run_hdim1024);
            default:
                break;
        }
    }
    throw Unsupported("this build has no split_d kernel for head_dim " +
                      std::to_string(plan.tile.head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::split_d
