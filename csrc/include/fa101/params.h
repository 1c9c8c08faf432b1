// Stage [2] of the flow: from user input to a checked question (Problem) and its data (Tensors).
//
// What is computed, once for the whole library:
//
//     S = softmax_scale * Q K^T, softcapped, plus bias, masked
//     P = softmax(S)      O = P V      lse = log sum exp S
//
//     q (batch, num_heads,    seqlen_q, head_dim)      o   like q, head_dim_v wide
//     k (batch, num_heads_kv, seqlen_k, head_dim)      lse (batch, num_heads, seqlen_q), float32,
//     v (batch, num_heads_kv, seqlen_k, head_dim_v)        natural logarithm
//
// Query head h reads key/value head h / (num_heads / num_heads_kv). A query all of whose logits are
// -inf, as one that sees no key, gives O = 0 and lse = -inf. NaN and inf in what a query may see
// propagate; what it may not see has no effect at all, even if it is NaN. Products accumulate in
// float32.
#pragma once

#include <fa101/export.h>
#include <fa101/tensor_view.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace fa101 {

// Order of the axes of q, k, v and o.
enum class Layout : uint8_t { kBHSD, kBSHD };

// Where the causal diagonal starts when seqlen_q != seqlen_k.
//   kTopLeft      query i sits at key i                          (PyTorch's is_causal)
//   kBottomRight  query i sits at key i + seqlen_k - seqlen_q    (flash-attn, KV caches)
enum class Align : uint8_t { kTopLeft, kBottomRight };

struct Options {
    bool causal = false;
    // Query i sees this many keys to either side of its place on the diagonal; none: no bound.
    std::optional<int64_t> window_left, window_right;
    Align align = Align::kTopLeft;
    std::optional<float> softmax_scale;  // default: 1 / sqrt(head_dim) of the caller's head_dim
    float softcap = 0.0f;                // > 0: S becomes softcap * tanh(S / softcap)

    // Optional arrays. bias and mask broadcast to (batch, num_heads, seqlen_q, seqlen_k) in either
    // layout: 2 to 4 axes, each as long as that or 1.
    const TensorView* bias = nullptr;  // float32 or the dtype of q; added to the logits; what is
                                       // finite stays finite, beyond +-2.3e38 not exactly
    const TensorView* mask = nullptr;  // bool; true: the query sees the key
    // (batch) int32: only that many keys of each batch entry exist. Read by the kernel, on the
    // device; what lies outside [0, seqlen_k] counts as the nearer end.
    const TensorView* seqlens_k = nullptr;
    // Keys that append() (kv_cache.h) adds to those of seqlens_k before the call.
    int64_t seqlen_new = 0;
    // (batch, max_pages) int32, rows contiguous: k and v are pages, (num_pages, heads, page_size,
    // head_dim) in bhsd. The keys of batch entry b are those of the pages page_table[b], in that
    // order, so that seqlen_k is max_pages * page_size. page_size is a power of two from 16 on. On
    // the device, like seqlens_k; a page outside of [0, num_pages) counts as the last.
    const TensorView* page_table = nullptr;
    // float32, (num_heads_kv) or (batch, num_heads_kv), for k and v in float8_e4m3fn: what the
    // elements of a head are to be multiplied by; none: 1. On the device, like seqlens_k.
    const TensorView *k_descale = nullptr, *v_descale = nullptr;
    const char *k_name = "k", *v_name = "v";  // what errors call them

    // Parts that split_kv cuts the keys of a tile of queries into; 0: as it sees fit. There are
    // fewer where there are fewer steps of its kernel, 16 to 128 keys.
    int64_t num_splits = 0;

    Layout layout = Layout::kBHSD;
    std::string_view kernel = "auto";
    std::string_view strategy = "auto";
};

// The question, without a pointer: equal Problems get equal Plans.
struct Problem {
    int64_t batch = 0;
    int64_t num_heads = 0;
    int64_t num_heads_kv = 0;
    int64_t seqlen_q = 0;
    int64_t seqlen_k = 0;
    int64_t head_dim = 0;
    int64_t head_dim_v = 0;

    DeviceType device = DeviceType::kCpu;
    DType dtype_q = DType::kFloat32;
    DType dtype_kv = DType::kFloat32;  // that of q, or float8_e4m3fn where q is 16 bits wide
    DType dtype_o = DType::kFloat32;

    float softmax_scale = 1.0f;
    float softcap = 0.0f;  // 0: none

    // The mask is two bounds on a diagonal: query i sees key j if and only if
    //     i + mask_left <= j <= i + mask_right      (and 0 <= j < seqlen_k)
    // With the diagonal at d, 0 (top left) or seqlen_k - seqlen_q (bottom right), causal is
    // mask_right = d and a window of w keys to the left mask_left = d - w.
    static constexpr int64_t kUnbounded = int64_t{1} << 40;
    int64_t mask_left = -kUnbounded;
    int64_t mask_right = kUnbounded;

    // The optional arrays of Options that are there.
    bool has_bias = false, has_mask = false, has_seqlens_k = false;
    DType dtype_bias = DType::kFloat32;
    int64_t seqlen_new = 0;  // keys of each batch entry that seqlens_k does not count yet
    int64_t page_size = 0;   // keys of a page of k and v; 0: they lie in one piece
    int64_t num_splits = 0;  // that split_kv shall make; 0: as it sees fit
    // With seqlens_k: the diagonal ends in the corner of the keys that exist (bottom right), so
    // both bounds move with their number.
    bool diagonal_follows_seqlens_k = false;

    // Every row of q, k, v and o starts on a 16-byte boundary and holds whole 16-byte vectors, so
    // that 128-bit loads and stores are legal.
    bool aligned16 = false;

    // Hopper's TMA can address q, k, v and o: each starts on a 16-byte boundary, and the strides of
    // its axes longer than 1 (but the last) are positive multiples of 16 bytes below 2^40 bytes. So
    // an expanded axis, stride 0, is out.
    bool tma = false;

    bool has_left_bound() const { return mask_left > 1 - seqlen_q; }
    bool has_right_bound() const { return mask_right < seqlen_k - 1; }
    int64_t group_size() const { return num_heads_kv > 0 ? num_heads / num_heads_kv : 1; }
    // Nothing to write: no kernel is launched.
    bool is_empty() const { return batch == 0 || num_heads == 0 || seqlen_q == 0; }
    FA101_EXPORT bool operator==(const Problem& other) const;
    // (query, key) pairs within the bounds, summed over batch and heads.
    FA101_EXPORT int64_t visible_pairs() const;
};

// What the elements of an fp8 head stand for: their value times this.
struct Descale {
    const float* ptr = nullptr;  // (batch, num_heads_kv), or null: 1
    int64_t batch_stride = 0, head_stride = 0;
};

// The data. Strides count elements; the last axis of q, k, v and o is contiguous.
struct Tensors {
    const void* q_ptr = nullptr;  // (batch, num_heads, seqlen_q, head_dim)
    const void* k_ptr = nullptr;  // (batch, num_heads_kv, seqlen_k, head_dim)
    const void* v_ptr = nullptr;  // (batch, num_heads_kv, seqlen_k, head_dim_v)
    void* o_ptr = nullptr;        // (batch, num_heads, seqlen_q, head_dim_v)
    float* lse_ptr = nullptr;     // (batch, num_heads, seqlen_q) contiguous, or null

    // Broadcast axes have stride 0.
    const void* bias_ptr = nullptr;          // (batch, num_heads, seqlen_q, seqlen_k), or null
    const uint8_t* mask_ptr = nullptr;       // (batch, num_heads, seqlen_q, seqlen_k), or null
    const int32_t* seqlens_k_ptr = nullptr;  // (batch), or null

    // With pages the batch axis of k and v counts pages.
    const int32_t* page_table_ptr = nullptr;  // (batch, max_pages), or null
    int64_t page_table_stride = 0;
    int64_t num_pages = 0;

    Descale k_descale, v_descale;

    int64_t q_batch_stride = 0, q_head_stride = 0, q_row_stride = 0;
    int64_t k_batch_stride = 0, k_head_stride = 0, k_row_stride = 0;
    int64_t v_batch_stride = 0, v_head_stride = 0, v_row_stride = 0;
    int64_t o_batch_stride = 0, o_head_stride = 0, o_row_stride = 0;
    int64_t bias_batch_stride = 0, bias_head_stride = 0, bias_row_stride = 0, bias_key_stride = 0;
    int64_t mask_batch_stride = 0, mask_head_stride = 0, mask_row_stride = 0, mask_key_stride = 0;
    int64_t seqlens_k_stride = 0;

    int device_index = 0;  // the GPU they are on
};

struct Params {
    Problem problem;
    Tensors tensors;
};

// The only maker of Problem and Tensors: every check on user input happens here, once, and kernels
// check nothing. `lse` may be null. Throws InvalidArgument or InvalidType.
FA101_EXPORT Params make_params(const TensorView& q, const TensorView& k, const TensorView& v,
                                const TensorView& o, const TensorView* lse, const Options& options);

}  // namespace fa101
