#include "flash_attn_sm90_split_d/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/mask.h"
#include "flash_attn_sm90_split_d/tile_config.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>

namespace fa101::sm90_split_d {
namespace {

// The smallest tile that holds q, k and v; 0: none does.
int tile_head_dim(const Problem& p) {
    for (int head_dim : kHeadDims) {
        if (std::max(p.head_dim, p.head_dim_v) <= head_dim) return head_dim;
    }
    return 0;
}

// The tiles come with the one of 256, after which they start.
constexpr bool kHasTiles = is_compiled(256);
constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_SM90_ARCHS) > 1 && kHasTiles;

}  // namespace

std::string supports(const Problem& p, const DeviceInfo& device) {
    if (device.arch != 90) {
        return "it is written for sm_90a (Hopper); the GPU has sm_" + std::to_string(device.arch);
    }
    if (p.dtype_q == DType::kFloat32 || p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("it needs float16 or bfloat16 for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
    if (std::string reason = refuse_extras(p); !reason.empty()) return reason;
    if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) {
        return "head_dim is " + std::to_string(p.head_dim) + " and head_dim_v " +
               std::to_string(p.head_dim_v) + "; they must be multiples of 8";
    }
    if (std::max(p.head_dim, p.head_dim_v) <= 256 || tile_head_dim(p) == 0) {
        return "head_dim is " + std::to_string(std::max(p.head_dim, p.head_dim_v)) +
               "; it takes from 257 to " + std::to_string(*std::rbegin(kHeadDims));
    }
    if (!kHasTiles) return "its tiles are not in this build (FA101_HEAD_DIMS has no 256)";
    if (!p.aligned16) return "each row of q, k, v and out must start at a multiple of 16 bytes";
    if (!p.tma) {  // out is written without TMA here, but one rule is enough
        return "TMA cannot address q, k, v or out: strides must be positive and less than 2^40 bytes";
    }
    constexpr int64_t kMaxTiles = std::numeric_limits<int>::max() / 2;
    const int64_t tiles = p.batch * p.num_heads * ceil_div<int64_t>(p.seqlen_q, kBlockM);
    if (tiles > kMaxTiles) {
        return "batch * num_heads * tiles is " + std::to_string(tiles) + "; it takes up to " +
               std::to_string(kMaxTiles);
    }
    return "";
}

Tile tile(const Problem& p, const DeviceInfo&) {
    return {kBlockM, kBlockN, tile_head_dim(p), /*num_warps=*/12, /*stages=*/1};
}

int64_t workspace(const Plan&, const Problem&) { return 0; }

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void*,
            Stream stream) {
    if constexpr (kIsBuilt) {
        switch (plan.tile.head_dim) {
            case 384:
                return run_hdim384(problem, tensors, stream);
            case 512:
                return run_hdim512(problem, tensors, stream);
            case 768:
                return run_hdim768(problem, tensors, stream);
            case 1024:
                return run_hdim1024(problem, tensors, stream);
            default:
                break;
        }
    }
    throw Unsupported("this build has no sm90 kernel for head_dim " +
                      std::to_string(plan.tile.head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::sm90_split_d
