#include "flash_attn_sm90/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "flash_attn_sm90/tile_config.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace fa101::sm90 {
namespace {

// The smallest compiled tile that holds q, k and v; null: none does.
const HeadDims* find_tile(const Problem& p) {
    for (const HeadDims& tile : kHeadDims) {
        if (is_compiled(tile.qk) && p.head_dim <= tile.qk && p.head_dim_v <= tile.v) return &tile;
    }
    return nullptr;
}

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_SM90_ARCHS) > 1;

}  // namespace

std::string supports(const Problem& p, const DeviceInfo& device) {
    if (device.arch != 90) {
        return "it is written for sm_90a (Hopper); the GPU has sm_" + std::to_string(device.arch);
    }
    if (p.dtype_q == DType::kFloat32 || p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("it needs float16 or bfloat16 for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
    Problem plain = p;
    plain.mask_left = -Problem::kUnbounded;
    plain.softcap = 0;
    if (std::string reason = refuse_extras(plain); !reason.empty()) return reason;
    if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) {
        return "head_dim is " + std::to_string(p.head_dim) + " and head_dim_v " +
               std::to_string(p.head_dim_v) + "; they must be multiples of 8";
    }
    if (find_tile(p) == nullptr) {
        return "head_dim is " + std::to_string(std::max(p.head_dim, p.head_dim_v)) +
               ", more than its tiles hold in this build (FA101_HEAD_DIMS, at most 256)";
    }
    if (!p.aligned16) return "each row of q, k, v and out must start at a multiple of 16 bytes";
    if (!p.tma) {
        return "TMA cannot address q, k, v or out: strides must be positive and less than 2^40 bytes";
    }
    constexpr int64_t kMaxTiles = std::numeric_limits<int>::max() / 2;
    const int64_t tiles = p.batch * p.num_heads * ceil_div<int64_t>(p.seqlen_q, 128);
    if (tiles > kMaxTiles) {
        return "batch * num_heads * tiles is " + std::to_string(tiles) + "; it takes up to " +
               std::to_string(kMaxTiles);
    }
    return "";
}

Tile tile(const Problem& p, const DeviceInfo& device) {
    const HeadDims head_dims = *find_tile(p);
    const Config config = config_for(p, device.num_sms, head_dims);
    return {config.block_m(), config.block_n, head_dims.qk, 4 * (1 + config.groups), config.stages};
}

int64_t workspace(const Plan& plan, const Problem& p) {
    return has_counter(plan.tile, p) ? kTileCounterBytes : 0;
}

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream) {
    if constexpr (kIsBuilt && is_compiled(64)) {
        if (plan.tile.head_dim == 64) return run_hdim64(plan, problem, tensors, workspace, stream);
    }
    if constexpr (kIsBuilt && is_compiled(96)) {
        if (plan.tile.head_dim == 96) return run_hdim96(plan, problem, tensors, workspace, stream);
    }
    if constexpr (kIsBuilt && is_compiled(128)) {
        if (plan.tile.head_dim == 128)
            return run_hdim128(plan, problem, tensors, workspace, stream);
    }
    if constexpr (kIsBuilt && is_compiled(192)) {
        if (plan.tile.head_dim == 192)
            return run_hdim192(plan, problem, tensors, workspace, stream);
    }
    if constexpr (kIsBuilt && is_compiled(256)) {
        if (plan.tile.head_dim == 256)
            return run_hdim256(plan, problem, tensors, workspace, stream);
    }
    throw Unsupported("this build has no sm90 kernel for head_dim " +
                      std::to_string(plan.tile.head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::sm90
