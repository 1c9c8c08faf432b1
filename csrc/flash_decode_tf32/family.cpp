#include "flash_decode_tf32/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/find_tile.h"
#include "common/mask.h"
#include "flash_decode/splits.h"
#include "flash_decode_tf32/tile_config.h"

#include <cstdint>
#include <string>

namespace fa101::decode_tf32 {
namespace {

// The rows of one key/value head: its group's queries.
int64_t packed_rows(const Problem& p) { return p.seqlen_q * p.group_size(); }

// The tile of up to 16 rows, or that of more.
const TileConfig* find_tile(const Problem& p, const DeviceInfo& device) {
    return fa101::find_tile(kTiles, p, device.smem_per_block, [&](const TileConfig& tile) {
        return packed_rows(p) <= tile.block_m || tile.block_m > 16;
    });
}

// Blocks of one split.
int64_t blocks_per_split(const Problem& p, const TileConfig& tile) {
    return p.batch * p.num_heads_kv * ceil_div<int64_t>(packed_rows(p), tile.block_m);
}

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_CUTE_ARCHS) > 1;

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
    if (FA101_HAS_CUDA && !kIsBuilt) return "this build has none of its float32 code (FA101_ARCHS)";
    const TileConfig* const tile = find_tile(p, device);
    if (tile == nullptr) return refuse_head_dim(kTiles, p, device, "float32 ");
    return flash_decode::refuse_grid(p, blocks_per_split(p, *tile) * splits(p, device).count);
}

Tile tile(const Problem& p, const DeviceInfo& device) {
    const TileConfig& tile = *find_tile(p, device);
    return {tile.block_m,  tile.block_n * tile.num_teams(),
            tile.head_dim, tile.num_warps,
            tile.slots,    static_cast<int>(std::max<int64_t>(p.group_size(), 1))};
}

Splits splits(const Problem& p, const DeviceInfo& device) {
    const TileConfig& tile = *find_tile(p, device);
    return flash_decode::choose_splits(p, blocks_per_split(p, tile),
                                       flash_decode::Slots::of(device, 2), tile.block_n);
}

void run(const Plan& plan, const Problem& problem, const Tensors& tensors, const Partials& partials,
         Stream stream) {
    const int head_dim = plan.tile.head_dim;
    if constexpr (kIsBuilt && is_compiled(64)) {
        if (head_dim == 64)
            return decode_tf32::run_hdim64(plan, problem, tensors, partials, stream);
    }
    if constexpr (kIsBuilt && is_compiled(128)) {
        if (head_dim == 128)
            return decode_tf32::run_hdim128(plan, problem, tensors, partials, stream);
    }
    if constexpr (kIsBuilt && is_compiled(256)) {
        if (head_dim == 256)
            return decode_tf32::run_hdim256(plan, problem, tensors, partials, stream);
    }
    throw Unsupported("this build has no float32 fa2_cute split_kv kernel for head_dim " +
                      std::to_string(head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::decode_tf32
