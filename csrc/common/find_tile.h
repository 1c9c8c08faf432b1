// The choice of a tile from a family's table: an array of structs with head_dim and smem_bytes(),
// in order of preference.
#pragma once

#include <fa101/device_info.h>
#include <fa101/params.h>

#include "common/built_head_dims.h"
#include "common/mask.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace fa101 {

// The first compiled tile that holds q, k and v in at most `smem_bytes` and suits; null: none does.
template <class Tile, size_t kSize, class Suits>
const Tile* find_tile(const Tile (&tiles)[kSize], const Problem& p, int64_t smem_bytes,
                      const Suits& suits) {
    for (const Tile& tile : tiles) {
        if (is_compiled(tile.head_dim) && std::max(p.head_dim, p.head_dim_v) <= tile.head_dim &&
            tile.smem_bytes() <= smem_bytes && suits(tile)) {
            return &tile;
        }
    }
    return nullptr;
}

template <class Tile, size_t kSize>
const Tile* find_tile(const Tile (&tiles)[kSize], const Problem& p, int64_t smem_bytes) {
    return find_tile(tiles, p, smem_bytes, [](const Tile&) { return true; });
}

// Why find_tile found none; `kind` names the tiles where a family has several tables: "float32 ".
template <class Tile, size_t kSize>
std::string refuse_head_dim(const Tile (&tiles)[kSize], const Problem& p, const DeviceInfo& device,
                            const std::string& kind = "") {
    const std::string widest = std::to_string(std::max(p.head_dim, p.head_dim_v));
    if (find_tile(tiles, p, std::numeric_limits<int64_t>::max()) == nullptr) {
        return "head_dim is " + widest + ", more than its " + kind +
               "tiles hold in this build (FA101_HEAD_DIMS, at most 256)";
    }
    return "its " + kind + "tiles for head_dim " + widest + " need more than the " +
           std::to_string(device.smem_per_block) + " bytes of shared memory a block has";
}

// "" or why a grid of a block for each tile of queries is too large.
inline std::string refuse_query_tiles(const Problem& p, int block_m) {
    const int64_t blocks = p.batch * p.num_heads * ceil_div<int64_t>(p.seqlen_q, block_m);
    if (blocks <= std::numeric_limits<int>::max()) return "";
    return "batch * num_heads * query tiles is " + std::to_string(blocks) +
           "; a grid holds 2^31 - 1 blocks";
}

}  // namespace fa101
