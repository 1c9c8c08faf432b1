#include "flash_attn_sm75/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/find_tile.h"
#include "flash_attn_sm75/tile_config.h"

#include <string>

namespace fa101::sm75 {
namespace {

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_SM75_ARCHS) > 1;

}  // namespace

std::string supports(const Problem& p, const DeviceInfo& device) {
    if (device.arch < 75) {
        return "it needs sm_75 or later (mma.m16n8k8, ldmatrix); the GPU has sm_" +
               std::to_string(device.arch);
    }
    if (p.dtype_q != DType::kFloat16 || p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("on sm_75 it needs float16 for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
    const TileConfig* const tile = find_tile(kTiles, p, device.smem_per_block);
    if (tile == nullptr) return refuse_head_dim(kTiles, p, device);
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
        if (head_dim == 64) return run_hdim64(problem, tensors, stream);
    }
    if constexpr (kIsBuilt && is_compiled(128)) {
        if (head_dim == 128) return run_hdim128(problem, tensors, stream);
    }
    if constexpr (kIsBuilt && is_compiled(256)) {
        if (head_dim == 256) return run_hdim256(problem, tensors, stream);
    }
    throw Unsupported("this build has no sm_75 kernel for head_dim " + std::to_string(head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::sm75
