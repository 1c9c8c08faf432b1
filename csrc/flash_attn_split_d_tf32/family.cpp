#include "flash_attn_split_d_tf32/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/mask.h"
#include "flash_attn_split_d_tf32/tile_config.h"
#include "flash_decode/splits.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace fa101::split_d_tf32 {
namespace {

// The smallest head_dim that holds q, k and v; of its tiles that fit, see tile_config.h. Null: none
// does.
const TileConfig* find_tile(const Problem& p, int64_t smem_bytes) {
    const TileConfig* best = nullptr;
    for (const TileConfig& tile : kTiles) {
        if (std::max(p.head_dim, p.head_dim_v) > tile.head_dim) continue;
        if (best != nullptr &&
            (tile.head_dim != best->head_dim || p.seqlen_q > best->block_m / 2)) {
            break;
        }
        const bool is_smaller = best == nullptr || tile.block_m < best->block_m;
        if (is_smaller && tile.smem_bytes() <= smem_bytes) best = &tile;
    }
    return best;
}

int64_t blocks_per_split(const Problem& p, const TileConfig& tile) {
    return p.batch * p.num_heads * ceil_div<int64_t>(p.seqlen_q, tile.block_m);
}

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_CUTE_ARCHS) > 1 && is_compiled(256);

}  // namespace

std::string supports(const Problem& p, const DeviceInfo& device) {
    if (device.arch < 80) {
        return "it needs sm_80 or later (cp.async, TF32 tensor cores); the GPU has sm_" +
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
    if (FA101_HAS_CUDA && !kIsBuilt) return "this build has none of its float32 code (FA101_ARCHS)";
    const TileConfig* const tile = find_tile(p, device.smem_per_block);
    if (tile == nullptr) {
        return "its float32 tiles for head_dim " + std::to_string(widest) + " need more than the " +
               std::to_string(device.smem_per_block) + " bytes of shared memory a block has";
    }
    return flash_decode::refuse_grid(p, blocks_per_split(p, *tile) * splits(p, device).count);
}

Tile tile(const Problem& p, const DeviceInfo& device) {
    const TileConfig& tile = *find_tile(p, device.smem_per_block);
    return {tile.block_m, kBlockN, tile.head_dim, kNumWarps, tile.slots};
}

Splits splits(const Problem& p, const DeviceInfo& device) {
    const TileConfig& tile = *find_tile(p, device.smem_per_block);
    const auto slots = flash_decode::Slots::of(device, tile.blocks_per_sm());
    return flash_decode::splits_if_idle(p, blocks_per_split(p, tile), slots, kBlockN);
}

void run(const Plan& plan, const Problem& problem, const Tensors& tensors, const Partials& partials,
         Stream stream) {
    if constexpr (kIsBuilt) {
        switch (plan.tile.head_dim) {
            case 384:
                return run_hdim384(plan, problem, tensors, partials, stream);
            case 512:
                return run_hdim512(plan, problem, tensors, partials, stream);
            case 768:
                return run_hdim768(plan, problem, tensors, partials, stream);
            case 1024:
                return run_hdim1024(plan, problem, tensors, partials, stream);
            default:
                break;
        }
    }
    throw Unsupported("this build has no float32 split_d kernel for head_dim " +
                      std::to_string(plan.tile.head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::split_d_tf32
