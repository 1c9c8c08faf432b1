#include "flash_attn_sm90/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "flash_attn_sm90/tile_config.h"
#include "flash_decode/family.h"
#include "flash_decode/splits.h"

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

// Why neither strategy serves, whatever the mask; or "".
std::string refuse(const Problem& p, const DeviceInfo& device) {
    if (device.arch != 90) {
        return "it is written for sm_90a (Hopper); the GPU has sm_" + std::to_string(device.arch);
    }
    if (p.dtype_q == DType::kFloat32 || p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("it needs float16 or bfloat16 for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
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
    return "";
}

std::string refuse_tiles(int64_t tiles) {
    constexpr int64_t kMaxTiles = std::numeric_limits<int>::max() / 2;
    if (tiles <= kMaxTiles) return "";
    return "batch * num_heads * tiles is " + std::to_string(tiles) + "; it takes up to " +
           std::to_string(kMaxTiles);
}

}  // namespace

std::string supports(const Problem& p, const DeviceInfo& device) {
    if (std::string reason = refuse(p, device); !reason.empty()) return reason;
    Problem plain = p;
    plain.mask_left = -Problem::kUnbounded;
    plain.softcap = 0;
    if (std::string reason = refuse_extras(plain); !reason.empty()) return reason;
    return refuse_tiles(num_tiles(p, 128));
}

std::string supports_splits(const Problem& p, const DeviceInfo& device) {
    if (std::string reason = refuse(p, device); !reason.empty()) return reason;
    Problem plain = p;
    plain.has_seqlens_k = false;
    // With lengths any window is one, or the capacity would choose the kernel.
    if (p.has_seqlens_k && p.mask_left != -Problem::kUnbounded) return "it has no window";
    if (std::string reason = refuse_extras(plain); !reason.empty()) return reason;
    const int count = splits(p, device).count;
    const int64_t items = num_tiles(p, 128) * count;
    if (std::string reason = refuse_tiles(items); !reason.empty()) return reason;
    return count > 1 ? flash_decode::refuse_grid(p, items) : "";
}

Tile tile(const Problem& p, const DeviceInfo& device) {
    const HeadDims head_dims = *find_tile(p);
    const int packed_heads = packed_heads_for(p, head_dims);
    const Config config = config_for(p, device.num_sms, head_dims, packed_heads);
    return {config.block_m(),   config.block_n, head_dims.qk,
            config.num_warps(), config.stages,  packed_heads};
}

int64_t workspace(const Plan& plan, const Problem& p) {
    return has_counter(plan.tile, p) ? kTileCounterBytes : 0;
}

Tile tile_of_splits(const Problem& p, const DeviceInfo&) {
    const HeadDims head_dims = *find_tile(p);
    const int packed_heads = packed_heads_for(p, head_dims);
    const bool has_few_rows = pack_heads(p, packed_heads).seqlen_q <= 64;
    const Config config = (has_few_rows ? one_group : two_groups)(head_dims.qk, head_dims.v);
    return {config.block_m(),   config.block_n, head_dims.qk,
            config.num_warps(), config.stages,  packed_heads};
}

// The number, up to what fills the multiprocessors, with which a model of them is done first. In
// keys that a block alone walks (9.8 ns at head_dim 128, H200): memory brings 82 blocks theirs in
// that time, a merge takes 300, and each row of each part 1/40 of one. With lengths on the device
// those are not known, and neither they nor the capacity count: where a sequence is split follows
// from its own keys, and what a full cache is not worth is never used.
Splits splits(const Problem& p, const DeviceInfo& device) {
    constexpr int64_t kTypicalKeys = 8192, kMost = 4096;
    constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
    const Tile tile = tile_of_splits(p, device);
    int64_t count = 1;
    if (p.num_splits > 0) {
        count = std::min(p.num_splits, kMost);
    } else {
        const int64_t tiles = num_tiles(pack_heads(p, tile.packed_heads), tile.block_m);
        const int64_t seen = clamp_to<int64_t>(p.seqlen_q + p.mask_right, 0, p.seqlen_k);
        const int64_t keys = p.has_seqlens_k ? kTypicalKeys : seen;
        const auto cost = [&](int64_t parts) {
            const int64_t read = keys * p.batch * p.num_heads_kv / 82;
            const int64_t merge = 300 + flash_decode::result_rows(p) * parts / 40;
            return std::max(keys / parts, read) + (parts > 1 ? merge : 0);
        };
        const int64_t most = std::min(device.num_sms / std::max<int64_t>(tiles, 1), keys / 256);
        for (int64_t parts = 2; parts <= most; ++parts) {
            if (cost(parts) < cost(count)) count = parts;
        }
    }
    const int64_t blocks = std::max<int64_t>(ceil_div<int64_t>(p.seqlen_k, tile.block_n), 1);
    const int64_t worth = blocks / min_blocks_of_part(p, tile.block_n);
    count = std::min({count, worth, kMaxInt / blocks});  // the kernel multiplies them
    Splits splits;
    splits.count = static_cast<int>(std::max<int64_t>(count, 1));
    splits.per_wave = splits.one_each = splits.count;
    return splits;
}

int64_t workspace_of_splits(const Plan& plan, const Problem& p) {
    return flash_decode::partials_bytes(plan, p);
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

void launch_splits(const Plan& plan, const Problem& problem, const Tensors& tensors,
                   void* workspace, Stream stream) {
    launch(plan, problem, tensors, workspace, stream);
    if constexpr (kIsBuilt) {
        if (plan.num_splits == 1) return;
        const auto parts = flash_decode::make_partials(plan, problem, plan.tile.block_n, workspace);
        flash_decode::run_combine(problem, tensors, parts, stream);
    }
}

}  // namespace fa101::sm90
