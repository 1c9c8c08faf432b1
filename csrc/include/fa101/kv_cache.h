// Appending to a KV cache, in place: what a decoder does with the keys of new tokens before it
// attends to all of them (Options::seqlens_k and seqlen_new say so to make_params).
//
//     k_cache row seqlens_k[b] + i  =  rotated(k row i)      for each batch entry b, in each head
//     v_cache row seqlens_k[b] + i  =  v row i
//
// A row without room, or whose page is outside of the cache, is not written: nothing else ever is.
//
// Into a cache of float8_e4m3fn go the rows, rotated, divided by the descale of their head, to the
// nearest code: ties to even, beyond +-448 (inf too) +-448, NaN as NaN.
//
// The rotary embedding (Su et al., arXiv 2104.09864) turns pairs (x, y) of the first rotary_dim
// columns of a row at position p by the angles of row p of cos and sin, in float32:
//
//     x' = x cos - y sin      y' = x sin + y cos
//
// where column i is paired with i + rotary_dim / 2 (as in Llama and GPT-NeoX) or, interleaved, with
// its neighbour (as in GPT-J). A key's position is its row in the cache.
#pragma once

#include <fa101/export.h>
#include <fa101/params.h>
#include <fa101/plan.h>
#include <fa101/tensor_view.h>

#include <cstdint>
#include <string>

namespace fa101 {

struct AppendOptions {
    Layout layout = Layout::kBHSD;
    const TensorView* seqlens_k = nullptr;   // (batch) int32: keys that are there; needed
    const TensorView* page_table = nullptr;  // see Options::page_table

    const TensorView *k_descale = nullptr, *v_descale = nullptr;  // see Options::k_descale

    // (positions, rotary_dim / 2), at least a position for each key there is room for; float32 or
    // the dtype of k. Absent: nothing is rotated.
    const TensorView *cos = nullptr, *sin = nullptr;
    bool interleaved = false;

    // The queries of the attention that follows, which may not be in the caches' memory. With
    // q_rotated they are rotated with the keys, to there: query i is at position seqlens_k + i, or
    // all are at seqlens_k. Past the last position of cos they stay there.
    const TensorView *q = nullptr, *q_rotated = nullptr;
    bool queries_advance = true;

    // What that attention writes: none of the above may be in that memory.
    const TensorView *out = nullptr, *lse = nullptr;
};

// Rows on their way: (batch, heads, rows) of head_dim contiguous elements. Strides count elements.
struct RowCopy {
    const void* src_ptr = nullptr;
    void* dst_ptr = nullptr;
    Descale descale;  // of a destination in fp8
    int64_t heads = 0, rows = 0, head_dim = 0;
    int64_t src_batch_stride = 0, src_head_stride = 0, src_row_stride = 0;
    int64_t dst_batch_stride = 0, dst_head_stride = 0, dst_row_stride = 0;
};

// A checked question, as kernels receive it.
struct AppendParams {
    Device device;
    DType dtype = DType::kFloat32;
    DType dtype_cache = DType::kFloat32;  // the same, or float8_e4m3fn
    int64_t batch = 0;
    int64_t capacity = 0;  // keys of a batch entry that there is room for
    RowCopy k, v;          // to the caches; with pages their batch axis counts pages
    RowCopy q;             // no rows: no queries
    bool queries_advance = true;
    bool aligned16 = false;  // 128-bit accesses are legal for k and v

    const int32_t* seqlens_k_ptr = nullptr;  // (batch)
    int64_t seqlens_k_stride = 0;
    const int32_t* page_table_ptr = nullptr;  // (batch, max_pages), or null
    int64_t page_table_stride = 0;
    int64_t page_size = 0, num_pages = 0;

    DType dtype_rotary = DType::kFloat32;
    const void *cos_ptr = nullptr, *sin_ptr = nullptr;  // (num_positions, rotary_dim / 2), or null
    int64_t cos_stride = 0, sin_stride = 0;
    int64_t num_positions = 0, rotary_dim = 0;
    bool interleaved = false;
};

// The only maker, as make_params is: every check, once. Throws InvalidArgument or InvalidType.
FA101_EXPORT AppendParams make_append_params(const TensorView& k, const TensorView& v,
                                             const TensorView& k_cache, const TensorView& v_cache,
                                             const AppendOptions& options);

// Enqueues the copy on `stream` (CUDA), or does it (CPU). One launch; never allocates, never
// synchronises, can be captured in a CUDA graph. What attends on the same stream sees it.
FA101_EXPORT void append(const AppendParams& params, Stream stream = nullptr);

// append(), then run() of the attention over these caches; in one launch where split_kv is the
// plan, q has 16 bits, a key/value head at most 16 rows (queries times the group), and up to 4 rows
// are new, none rotated. In that launch nothing orders what one batch entry appends and another
// reads: where entries share a page, the new rows must lie in pages of their own.
FA101_EXPORT void append_and_run(const AppendParams& params, const Plan& plan,
                                 const Problem& problem, const Tensors& tensors, void* workspace,
                                 Stream stream);

// explain() of append_and_run(): also whether it takes one launch.
FA101_EXPORT std::string explain(const AppendParams& params, const Plan& plan,
                                 const Problem& problem, const Tensors& tensors,
                                 const DeviceInfo& device);

}  // namespace fa101
