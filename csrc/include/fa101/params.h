// Stage [2] of the flow: from user input to a checked question (Problem) and its data (Tensors).
//
// What is computed, once for the whole library:
//
//     S = softmax_scale * Q K^T, masked      P = softmax(S)      O = P V      lse = log sum exp S
//
//     q (batch, num_heads,    seqlen_q, head_dim)      o   like q, head_dim_v wide
//     k (batch, num_heads_kv, seqlen_k, head_dim)      lse (batch, num_heads, seqlen_q), float32,
//     v (batch, num_heads_kv, seqlen_k, head_dim_v)        natural logarithm
//
// Query head h reads key/value head h / (num_heads / num_heads_kv). A query that sees no key gives
// O = 0 and lse = -inf. NaN and inf in what a query may see propagate; what it may not see has no
// effect at all, even if it is NaN. Products accumulate in float32.
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
    Align align = Align::kTopLeft;
    std::optional<float> softmax_scale;  // default: 1 / sqrt(head_dim) of the caller's head_dim
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
    DType dtype_kv = DType::kFloat32;
    DType dtype_o = DType::kFloat32;

    float softmax_scale = 1.0f;

    // The mask is a bound on a diagonal: query i sees key j if and only if j <= i + mask_right (and
    // j < seqlen_k). Causal is 0 (top left) or seqlen_k - seqlen_q (bottom right); no mask is
    // seqlen_k, which every key satisfies.
    int64_t mask_right = 0;

    // Every row of q, k, v and o starts on a 16-byte boundary and holds whole 16-byte vectors, so
    // that 128-bit loads and stores are legal.
    bool aligned16 = false;

    // Hopper's TMA can address q, k and v: each starts on a 16-byte boundary, and the strides of
    // its axes longer than 1 (but the last) are positive multiples of 16 bytes below 2^40 bytes. So
    // an expanded axis, stride 0, is out.
    bool tma = false;

    bool is_masked() const { return mask_right < seqlen_k - 1; }
    int64_t group_size() const { return num_heads_kv > 0 ? num_heads / num_heads_kv : 1; }
    // Nothing to write: no kernel is launched.
    bool is_empty() const { return batch == 0 || num_heads == 0 || seqlen_q == 0; }
    // (query, key) pairs that are visible, summed over batch and heads.
    FA101_EXPORT int64_t visible_pairs() const;
};

// The data. Strides count elements; the last axis of q, k, v and o is contiguous.
struct Tensors {
    const void* q_ptr = nullptr;  // (batch, num_heads, seqlen_q, head_dim)
    const void* k_ptr = nullptr;  // (batch, num_heads_kv, seqlen_k, head_dim)
    const void* v_ptr = nullptr;  // (batch, num_heads_kv, seqlen_k, head_dim_v)
    void* o_ptr = nullptr;        // (batch, num_heads, seqlen_q, head_dim_v)
    float* lse_ptr = nullptr;     // (batch, num_heads, seqlen_q) contiguous, or null

    int64_t q_batch_stride = 0, q_head_stride = 0, q_row_stride = 0;
    int64_t k_batch_stride = 0, k_head_stride = 0, k_row_stride = 0;
    int64_t v_batch_stride = 0, v_head_stride = 0, v_row_stride = 0;
    int64_t o_batch_stride = 0, o_head_stride = 0, o_row_stride = 0;

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
