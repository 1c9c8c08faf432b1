// What the planner and the registry see of the kernel that splits the keys, and what its parts
// share on the host.
#pragma once

#include <fa101/kv_cache.h>

#include "common/divider.h"
#include "flash_decode/key_splits.h"
#include "kernel_family.h"

#include <cstdint>

namespace fa101::flash_decode {

std::string supports(const Problem&, const DeviceInfo&);
Tile tile(const Problem&, const DeviceInfo&);
Splits splits(const Problem&, const DeviceInfo&);
int64_t workspace(const Plan&, const Problem&);
void launch(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);
bool can_append(const AppendParams&, const Plan&, const Problem&, const Tensors&);
void append_and_launch(const AppendParams&, const Plan&, const Problem&, const Tensors&,
                       void* workspace, Stream);

// The parts of the result that the splits leave, by row as lse counts them, (batch, num_heads,
// seqlen_q), and split. With one split there are none.
struct Partials {
    int num_splits = 1;
    KeySplits keys;
    float* lse = nullptr;  // (rows, num_splits), to base 2
    float* o = nullptr;    // (rows, num_splits, o_stride), divided by l; unset where lse is -inf
    int64_t o_stride = 0;  // head_dim_v rounded up to whole vectors of four

    // For the kernel that merges them itself, the last blocks of its grid (merge.cuh).
    uint64_t* flags = nullptr;  // (rows, num_splits): `nonce` when the part is there
    uint64_t nonce = 0;         // this launch's own, never 0
    int key_blocks = 0;         // the blocks before those that merge, by split, then as below
    int rows_per_merge = 1;     // of a block that merges: 1, or one a warp
    Divider batch_heads_kv, heads_kv, m_blocks;  // batch * num_heads_kv; tiles of a head's rows
    Divider group;                               // query heads of a key/value head
};

// Parts that a warp absorbs at once where it merges, of a tile of that head_dim (merge.cuh).
constexpr int merge_batch(int head_dim) { return head_dim <= 128 ? 16 : 8; }

// One translation unit each, for the head_dims of tile_config.h. AppendParams of no batch: nothing
// to append.
void run_hdim64(const Plan&, const Problem&, const Tensors&, const Partials&, const AppendParams&,
                Stream);
void run_hdim96(const Plan&, const Problem&, const Tensors&, const Partials&, const AppendParams&,
                Stream);
void run_hdim128(const Plan&, const Problem&, const Tensors&, const Partials&, const AppendParams&,
                 Stream);
void run_hdim192(const Plan&, const Problem&, const Tensors&, const Partials&, const AppendParams&,
                 Stream);
void run_hdim256(const Plan&, const Problem&, const Tensors&, const Partials&, const AppendParams&,
                 Stream);

// The merge of the other kernels: into o and lse, so many columns of o in a block.
constexpr int kMergeCols = 256;
void run_combine(const Problem&, const Tensors&, const Partials&, Stream);

}  // namespace fa101::flash_decode
