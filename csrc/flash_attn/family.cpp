#include "flash_attn/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/find_tile.h"
#include "flash_attn/tile_config.h"
#include "flash_attn_sm75/family.h"
#include "flash_attn_tf32/family.h"

#include <cstdint>
#include <string>

namespace fa101::fa2_cute {
namespace {

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_CUTE_ARCHS) > 1;

// float32 has kernels of its own, three TF32 products each, and so has Turing, without cp.async.
// The latter answer for later GPUs too where nothing better was built: by their PTX.
bool is_turing(const DeviceInfo& device) {
    return device.arch < 80 || (sizeof(FA101_CUTE_ARCHS) == 1 && sizeof(FA101_SM75_ARCHS) > 1);
}
bool is_turing(const Tile& tile) { return tile.stages == 1; }

}  // namespace

std::string supports(const Problem& p, const DeviceInfo& device) {
    if (p.dtype_q == DType::kFloat32) return tf32::supports(p, device);
    if (is_turing(device)) return sm75::supports(p, device);
    if (p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("it needs one dtype for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
    const TileConfig* const tile = find_tile(kTiles, p, device.smem_per_block);
    if (tile == nullptr) return refuse_head_dim(kTiles, p, device);
    return refuse_query_tiles(p, tile->block_m);
}

Tile tile(const Problem& p, const DeviceInfo& device) {
    if (p.dtype_q == DType::kFloat32) return tf32::tile(p, device);
    if (is_turing(device)) return sm75::tile(p, device);
    const TileConfig& plain = *find_tile(kTiles, p, device.smem_per_block);
    const TileConfig tile = has_extras(p) ? plain.with_extras() : plain;
    return {tile.block_m, tile.block_n, tile.head_dim, tile.num_warps, tile.stages};
}

int64_t workspace(const Plan&, const Problem&) { return 0; }

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream) {
    if (problem.dtype_q == DType::kFloat32) {
        return tf32::launch(plan, problem, tensors, workspace, stream);
    }
    if (is_turing(plan.tile)) return sm75::launch(plan, problem, tensors, workspace, stream);
    const int head_dim = plan.tile.head_dim;
    if constexpr (kIsBuilt && is_compiled(64)) {
        if (head_dim == 64) return run_hdim64(plan, problem, tensors, stream);
    }
    if constexpr (kIsBuilt && is_compiled(96)) {
        if (head_dim == 96) return run_hdim96(plan, problem, tensors, stream);
    }
    if constexpr (kIsBuilt && is_compiled(128)) {
        if (head_dim == 128) return run_hdim128(plan, problem, tensors, stream);
    }
    if constexpr (kIsBuilt && is_compiled(192)) {
        if (head_dim == 192) return run_hdim192(plan, problem, tensors, stream);
    }
    if constexpr (kIsBuilt && is_compiled(256)) {
        if (head_dim == 256) return run_hdim256(plan, problem, tensors, stream);
    }
    throw Unsupported("this build has no fa2_cute kernel for head_dim " + std::to_string(head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::fa2_cute
