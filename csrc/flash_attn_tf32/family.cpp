#include "flash_attn_tf32/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/find_tile.h"
#include "flash_attn_tf32/tile_config.h"

#include <string>

namespace fa101::tf32 {
namespace {

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_CUTE_ARCHS) > 1;

}  // namespace

std::string supports(const Problem& p, const DeviceInfo& device) {
    if (device.arch < 80) {
        return "it needs sm_80 or later (cp.async, TF32 tensor cores); the GPU has sm_" +
               std::to_string(device.arch);
    }
    if (p.dtype_q != DType::kFloat32 || p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("it needs float32 for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
    if (FA101_HAS_CUDA && !kIsBuilt) return "this build has none of its float32 code (FA101_ARCHS)";
    const TileConfig* const tile = find_tile(kTiles, p, device.smem_per_block);
    if (tile == nullptr) return refuse_head_dim(kTiles, p, device, "float32 ");
    return refuse_query_tiles(p, tile->block_m);
}

Tile tile(const Problem& p, const DeviceInfo& device) {
    const TileConfig& tile = *find_tile(kTiles, p, device.smem_per_block);
    return {tile.block_m, tile.block_n, tile.head_dim, tile.num_warps, /*stages=*/1};
}

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void*,
            Stream stream) {
    const int head_dim = plan.tile.head_dim;
    if constexpr (kIsBuilt && is_compiled(64)) {
        if (head_dim == 64) return run_hdim64(plan, problem, tensors, stream);
    }
    if constexpr (kIsBuilt && is_compiled(128)) {
        if (head_dim == 128) return run_hdim128(plan, problem, tensors, stream);
    }
    if constexpr (kIsBuilt && is_compiled(256)) {
        if (head_dim == 256) return run_hdim256(plan, problem, tensors, stream);
    }
    throw Unsupported("this build has no float32 fa2_cute kernel for head_dim " +
                      std::to_string(head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::tf32
