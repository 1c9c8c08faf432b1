#include "flash_decode/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/mask.h"
#include "flash_decode/tile_config.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace fa101::flash_decode {
namespace {

// The rows of one key/value head: its group's queries.
int64_t packed_rows(const Problem& p) { return p.seqlen_q * p.group_size(); }

// The compiled tile that holds q, k and v; null: none does.
const TileConfig* find_tile(const Problem& p) {
    for (const TileConfig& tile : kTiles) {
        if (is_compiled(tile.head_dim) && std::max(p.head_dim, p.head_dim_v) <= tile.head_dim &&
            (packed_rows(p) <= tile.block_m || tile.block_m > 16)) {
            return &tile;
        }
    }
    return nullptr;
}

// Blocks of one split.
int64_t blocks_per_split(const Problem& p, const TileConfig& tile) {
    return p.batch * p.num_heads_kv * ceil_div<int64_t>(packed_rows(p), tile.block_m);
}

// Keys of a split: from nothing that a longer cache or other company would change. So it is the
// largest that, with 8192 keys, fills whole waves of two blocks a multiprocessor, or nearly. Small
// ones cost: a row's part of O is 8 bytes a column, written and read, K and V are 4 bytes a column
// and key. That is 3 % for 4 rows and 256 keys, 25 % for 64 rows and 512, served by L2 in part.
//
// It is a power of two, so that the number of splits, if more than one, tells it.
int64_t chunk(const Problem& p, const DeviceInfo& device) {
    constexpr int64_t kTypicalSeqlen = 8192;
    const TileConfig& tile = *find_tile(p);
    const int64_t slots = 2 * std::max(device.num_sms, 1);
    const int64_t smallest = tile.block_m == 16 ? kMinChunk : 2 * kMinChunk;
    int64_t best = kMaxChunk;
    double best_fill = 0;
    for (int64_t chunk = kMaxChunk; chunk >= smallest && best_fill < 0.9; chunk /= 2) {
        const int64_t blocks = blocks_per_split(p, tile) * (kTypicalSeqlen / chunk);
        const int64_t waves = std::max<int64_t>(ceil_div(blocks, slots), 1);
        const double fill = static_cast<double>(blocks) / static_cast<double>(waves * slots);
        if (fill > best_fill) {
            best_fill = fill;
            best = chunk;
        }
    }
    return best;
}

// The same where the caller says how many splits: the keys there may be in as many pieces, each of
// whole steps of every tile.
int64_t forced_chunk(const Problem& p) {
    const int64_t steps = ceil_div<int64_t>(ceil_div(p.seqlen_k, p.num_splits), kChunkStep);
    return std::max<int64_t>(steps, 1) * kChunkStep;
}

int64_t chunk_of(const Plan& plan, const Problem& p) {
    if (plan.num_splits == 1) return p.seqlen_k;
    if (p.num_splits > 0) return forced_chunk(p);
    int64_t chunk = kMinChunk;
    while (ceil_div(p.seqlen_k, chunk) > plan.num_splits) chunk *= 2;
    return chunk;
}

int64_t num_rows(const Problem& p) { return p.batch * p.num_heads * p.seqlen_q; }

// Multiples of four floats, so that rows of O start on 16-byte boundaries.
int64_t lse_floats(const Plan& plan, const Problem& p) {
    return ceil_div<int64_t>(num_rows(p) * plan.num_splits, 4) * 4;
}
int64_t o_stride(const Problem& p) { return ceil_div<int64_t>(p.head_dim_v, 4) * 4; }

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_CUTE_ARCHS) > 1;

}  // namespace

std::string supports(const Problem& p, const DeviceInfo& device) {
    if (device.arch < 80) {
        return "it needs sm_80 or later (cp.async, mma.m16n8k16); the GPU has sm_" +
               std::to_string(device.arch);
    }
    if (p.dtype_q == DType::kFloat32 || p.dtype_kv != p.dtype_q || p.dtype_o != p.dtype_q) {
        return std::string("it needs float16 or bfloat16 for q, k, v and out; they have ") +
               name_of(p.dtype_q) + ", " + name_of(p.dtype_kv) + " and " + name_of(p.dtype_o);
    }
    const TileConfig* const tile = find_tile(p);
    if (tile == nullptr) {
        return "head_dim is " + std::to_string(std::max(p.head_dim, p.head_dim_v)) +
               ", more than its tiles hold in this build (FA101_HEAD_DIMS, at most 256)";
    }
    if (tile->smem_bytes() > device.smem_per_block) {
        return "its tile for head_dim " + std::to_string(tile->head_dim) + " needs " +
               std::to_string(tile->smem_bytes()) + " bytes of shared memory; a block has " +
               std::to_string(device.smem_per_block);
    }
    constexpr int64_t kMaxGrid = std::numeric_limits<int>::max();
    const int64_t blocks = blocks_per_split(p, *tile) * num_splits(p, device);
    if (blocks > kMaxGrid || num_rows(p) > kMaxGrid || packed_rows(p) > kMaxGrid - tile->block_m) {
        return "its grids would have " + std::to_string(blocks) + " blocks for the keys and " +
               std::to_string(num_rows(p)) + " rows to merge; 2^31 - 1 is the limit";
    }
    return "";
}

Tile tile(const Problem& p, const DeviceInfo&) {
    const TileConfig& tile = *find_tile(p);
    return {tile.block_m, tile.block_n * tile.num_teams(), tile.head_dim, tile.num_warps,
            tile.stages};
}

int num_splits(const Problem& p, const DeviceInfo& device) {
    const int64_t keys = p.num_splits > 0 ? forced_chunk(p) : chunk(p, device);
    return static_cast<int>(std::max<int64_t>(ceil_div(p.seqlen_k, keys), 1));
}

int64_t workspace(const Plan& plan, const Problem& p) {
    if (plan.num_splits == 1) return 0;
    const int64_t o_floats = num_rows(p) * plan.num_splits * o_stride(p);
    return static_cast<int64_t>(sizeof(float)) * (lse_floats(plan, p) + o_floats);
}

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream) {
    Partials partials;
    partials.num_splits = plan.num_splits;
    partials.chunk = static_cast<int>(chunk_of(plan, problem));
    partials.o_stride = o_stride(problem);
    if (plan.num_splits > 1) {
        partials.lse = static_cast<float*>(workspace);
        partials.o = partials.lse + lse_floats(plan, problem);
    }
    [[maybe_unused]] const auto run = [&](auto run_hdim) {
        run_hdim(plan, problem, tensors, partials, stream);
        if (plan.num_splits > 1) run_combine(problem, tensors, partials, stream);
    };
    const int head_dim = plan.tile.head_dim;
    if constexpr (kIsBuilt && is_compiled(64)) {
        if (head_dim == 64) return run(run_hdim64);
    }
    if constexpr (kIsBuilt && is_compiled(96)) {
        if (head_dim == 96) return run(run_hdim96);
    }
    if constexpr (kIsBuilt && is_compiled(128)) {
        if (head_dim == 128) return run(run_hdim128);
    }
    if constexpr (kIsBuilt && is_compiled(192)) {
        if (head_dim == 192) return run(run_hdim192);
    }
    if constexpr (kIsBuilt && is_compiled(256)) {
        if (head_dim == 256) return run(run_hdim256);
    }
    throw Unsupported("this build has no fa2_cute split_kv kernel for head_dim " +
                      std::to_string(head_dim) +
                      "; FA101_ARCHS and FA101_HEAD_DIMS say what is built");
}

}  // namespace fa101::flash_decode
