#include "flash_decode/family.h"

#include <fa101/error.h>

#include "build_config.h"
#include "common/built_head_dims.h"
#include "common/mask.h"
#include "common/nonce.h"
#include "flash_decode/splits.h"
#include "flash_decode/tile_config.h"
#include "flash_decode_tf32/family.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace fa101::flash_decode {
namespace {

// The rows of one key/value head: its group's queries.
int64_t packed_rows(const Problem& p) { return p.seqlen_q * p.group_size(); }

// The compiled tile that holds q, k and v; null: none does.
const TileConfig* find_tile(const Problem& p) {
    for (const TileConfig& tile : kTiles) {
        if (is_compiled(tile.head_dim) && std::max(p.head_dim, p.head_dim_v) <= tile.head_dim &&
            tile.kv_bytes == size_of(p.dtype_kv) &&
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

// Keys of a team's step: with 16 rows each warp is a team (tile_config.h, in float32 too).
int step_of(const Tile& tile) { return tile.block_n / (tile.block_m == 16 ? tile.num_warps : 1); }

// What the kernel needs to know of its grid, and to merge the parts.
Partials with_grid(Partials partials, const Plan& plan, const Problem& p, void* workspace) {
    const int64_t batch_heads_kv = p.batch * p.num_heads_kv;
    const int64_t m_blocks = ceil_div<int64_t>(packed_rows(p), plan.tile.block_m);
    partials.key_blocks = static_cast<int>(batch_heads_kv * m_blocks * plan.num_splits);
    partials.batch_heads_kv = Divider::by(batch_heads_kv);
    partials.heads_kv = Divider::by(p.num_heads_kv);
    partials.m_blocks = Divider::by(m_blocks);
    partials.group = Divider::by(p.group_size());
    partials.rows_per_merge = rows_per_merge(plan, p);
    if (plan.num_splits > 1) {
        partials.flags = reinterpret_cast<uint64_t*>(static_cast<std::byte*>(workspace) +
                                                     partials_bytes(plan, p));
        partials.nonce = next_nonce();
    }
    return partials;
}

constexpr bool kIsBuilt = FA101_HAS_CUDA && sizeof(FA101_DECODE_ARCHS) > 1;

}  // namespace

// float32 has a kernel of its own, which shares the splits; a second kernel merges its parts.
std::string supports(const Problem& p, const DeviceInfo& device) {
    if (p.dtype_q == DType::kFloat32) return decode_tf32::supports(p, device);
    if (device.arch < 80) {
        return "it needs sm_80 or later (cp.async, mma.m16n8k16); the GPU has sm_" +
               std::to_string(device.arch);
    }
    if ((p.dtype_kv != p.dtype_q && p.dtype_kv != DType::kFloat8E4M3) || p.dtype_o != p.dtype_q) {
        return std::string(
                   "it needs one dtype for q, k, v and out, or k and v in fp8; they have ") +
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
    const int count = splits(p, device).count;
    return refuse_grid(p, blocks_per_split(p, *tile) * count + (count > 1 ? result_rows(p) : 0));
}

Tile tile(const Problem& p, const DeviceInfo& device) {
    if (p.dtype_q == DType::kFloat32) return decode_tf32::tile(p, device);
    const TileConfig& tile = *find_tile(p);
    return {tile.block_m,  tile.block_n * tile.num_teams(),
            tile.head_dim, tile.num_warps,
            tile.stages,   static_cast<int>(std::max<int64_t>(p.group_size(), 1))};
}

// Two blocks a multiprocessor.
Splits splits(const Problem& p, const DeviceInfo& device) {
    if (p.dtype_q == DType::kFloat32) return decode_tf32::splits(p, device);
    const TileConfig& tile = *find_tile(p);
    return choose_splits(p, blocks_per_split(p, tile), Slots::of(device, 2), tile.block_n);
}

int64_t workspace(const Plan& plan, const Problem& p) {
    return partials_bytes(plan, p) + (p.dtype_q == DType::kFloat32 ? 0 : flags_bytes(plan, p));
}

namespace {

void launch(const AppendParams& new_keys, const Plan& plan, const Problem& problem,
            const Tensors& tensors, void* workspace, Stream stream) {
    const Partials partials = make_partials(plan, problem, step_of(plan.tile), workspace);
    if (problem.dtype_q == DType::kFloat32) {
        if constexpr (kIsBuilt) {
            decode_tf32::run(plan, problem, tensors, partials, stream);
            if (plan.num_splits > 1) run_combine(problem, tensors, partials, stream);
            return;
        }
    }
    [[maybe_unused]] const auto run = [&](auto run_hdim) {
        run_hdim(plan, problem, tensors, with_grid(partials, plan, problem, workspace), new_keys,
                 stream);
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

// Whether the attention reads the caches that the new rows go to, all of them.
bool reads_them(const Problem& p, const Tensors& t, const AppendParams& a) {
    const auto are_the_same = [](const RowCopy& copy, const void* ptr, int64_t batch_stride,
                                 int64_t head_stride, int64_t row_stride) {
        return copy.dst_ptr == ptr && copy.dst_batch_stride == batch_stride &&
               copy.dst_head_stride == head_stride && copy.dst_row_stride == row_stride;
    };
    return are_the_same(a.k, t.k_ptr, t.k_batch_stride, t.k_head_stride, t.k_row_stride) &&
           are_the_same(a.v, t.v_ptr, t.v_batch_stride, t.v_head_stride, t.v_row_stride) &&
           a.batch == p.batch && a.k.heads == p.num_heads_kv && a.k.head_dim == p.head_dim &&
           a.v.head_dim == p.head_dim_v && a.dtype_cache == p.dtype_kv &&
           a.k.rows == p.seqlen_new && a.seqlens_k_ptr == t.seqlens_k_ptr &&
           a.seqlens_k_stride == t.seqlens_k_stride && a.page_size == p.page_size &&
           a.page_table_ptr == t.page_table_ptr && a.page_table_stride == t.page_table_stride;
}

}  // namespace

void launch(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
            Stream stream) {
    launch({}, plan, problem, tensors, workspace, stream);
}

// Few new rows, as split 0 writes all; none rotated, for each block would rotate its queries too;
// and one tile of up to 16 rows.
bool can_append(const AppendParams& new_keys, const Plan& plan, const Problem& problem,
                const Tensors& tensors) {
    constexpr int64_t kFewRows = 4;
    return reads_them(problem, tensors, new_keys) && new_keys.dtype == problem.dtype_q &&
           new_keys.rotary_dim == 0 && problem.dtype_q != DType::kFloat32 &&
           plan.tile.block_m <= 16 && new_keys.k.rows <= kFewRows;
}

void append_and_launch(const AppendParams& new_keys, const Plan& plan, const Problem& problem,
                       const Tensors& tensors, void* workspace, Stream stream) {
    launch(new_keys, plan, problem, tensors, workspace, stream);
}

}  // namespace fa101::flash_decode
