// [2] Every check on user input. Below this file nothing is checked again.
#include <fa101/error.h>
#include <fa101/params.h>

#include "overlap.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

namespace fa101 {
namespace {

// Kernels count rows and blocks in 32 bits (offsets are 64-bit), with room for the last tile.
constexpr int64_t kMaxSeqlen = std::numeric_limits<int32_t>::max() - 4096;

// What kernels divide by and multiply with stays far from float32's ends.
constexpr float kMinSoftcap = 1e-20f, kMaxSoftcap = 1e20f;

std::string describe(const int64_t* values, int n) {
    std::string text = "(";
    for (int i = 0; i < n; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
    return text + (n == 1 ? ",)" : ")");
}

std::string describe(Device device) {
    return device.type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

void require_device(const TensorView& t, const char* name, const TensorView& q) {
    if (t.device != q.device) {
        throw InvalidArgument(std::string(name) + " is on " + describe(t.device) + " but q is on " +
                              describe(q.device) + "; all tensors must be on one device");
    }
}

void require_element_alignment(const TensorView& t, const char* name) {
    if (reinterpret_cast<uintptr_t>(t.data) % size_of(t.dtype) != 0) {
        throw InvalidArgument(std::string(name) + " starts at an address that is no multiple of " +
                              std::to_string(size_of(t.dtype)) + ", the size of its " +
                              name_of(t.dtype) + " elements");
    }
}

// One tensor's axes, whatever the layout.
struct Axes {
    int64_t batch, heads, rows, dim;
    int64_t batch_stride, head_stride, row_stride;
};

Axes axes_of(const TensorView& t, const char* name, Layout layout) {
    const bool bhsd = layout == Layout::kBHSD;
    if (t.ndim != 4) {
        throw InvalidArgument(std::string(name) + " has " + std::to_string(t.ndim) +
                              " dimensions; it must have 4: " +
                              (bhsd ? "(batch, heads, seqlen, head_dim) for layout bhsd"
                                    : "(batch, seqlen, heads, head_dim) for layout bshd"));
    }
    for (int i = 0; i < 4; ++i) {
        if (t.shape[i] < 0) {
            throw InvalidArgument(std::string(name) + " has shape " + describe(t.shape, 4) +
                                  "; sizes must not be negative");
        }
    }
    const bool empty = t.shape[0] * t.shape[1] == 0 || t.shape[2] * t.shape[3] == 0;
    if (!empty && t.shape[3] > 1 && t.strides[3] != 1) {
        throw InvalidArgument(std::string(name) + " has strides " + describe(t.strides, 4) +
                              "; the last axis (head_dim) must be contiguous, stride 1");
    }
    const int h = bhsd ? 1 : 2, s = bhsd ? 2 : 1;
    if (t.shape[s] > kMaxSeqlen) {
        throw InvalidArgument(std::string(name) + " has sequence length " +
                              std::to_string(t.shape[s]) + "; at most " +
                              std::to_string(kMaxSeqlen) + " is supported");
    }
    if (t.shape[3] > kMaxSeqlen) {
        throw InvalidArgument(std::string(name) + " has head_dim " + std::to_string(t.shape[3]) +
                              "; at most " + std::to_string(kMaxSeqlen) + " is supported");
    }
    if (!empty && t.data == nullptr) {
        throw InvalidArgument(std::string(name) + " has no data (a null pointer)");
    }
    if (!empty) require_element_alignment(t, name);
    return {t.shape[0],   t.shape[h],   t.shape[s],  t.shape[3],
            t.strides[0], t.strides[h], t.strides[s]};
}

void require_same(const char* what, const char* name, int64_t got, const char* other,
                  int64_t expected) {
    if (got != expected) {
        throw InvalidArgument(std::string(name) + " has " + what + " " + std::to_string(got) +
                              " but " + other + " has " + std::to_string(expected) +
                              "; they must be equal");
    }
}

void require_like_q(const TensorView& t, const char* name, const TensorView& q) {
    if (t.dtype != q.dtype) {
        throw InvalidType(std::string(name) + " has dtype " + name_of(t.dtype) +
                          " but q has dtype " + name_of(q.dtype) + "; they must be equal");
    }
    require_device(t, name, q);
}

// The strides with which bias or mask is read as (batch, heads, seqlen_q, seqlen_k).
struct BroadcastStrides {
    int64_t batch, head, row, key;
};

BroadcastStrides broadcast_strides(const TensorView& t, const char* name, const TensorView& q,
                                   const int64_t (&target)[4]) {
    require_device(t, name, q);
    bool fits = t.ndim >= 2 && t.ndim <= 4;
    int64_t strides[4] = {}, size = 1;
    for (int i = 0; fits && i < t.ndim; ++i) {
        const int axis = 4 - t.ndim + i;
        fits = t.shape[i] == target[axis] || t.shape[i] == 1;
        strides[axis] = t.shape[i] == 1 ? 0 : t.strides[i];
        size *= t.shape[i];
    }
    if (!fits) {
        throw InvalidArgument(std::string(name) + " has " + std::to_string(t.ndim) +
                              " dimensions, shape " +
                              describe(t.shape, std::min(t.ndim, kMaxDims)) +
                              "; it must have 2 to 4 axes that broadcast to (batch, heads, "
                              "seqlen_q, seqlen_k) = " +
                              describe(target, 4));
    }
    if (size != 0 && t.data == nullptr) {
        throw InvalidArgument(std::string(name) + " has no data (a null pointer)");
    }
    require_element_alignment(t, name);
    return {strides[0], strides[1], strides[2], strides[3]};
}

// Where a window of `keys` to one side ends, counted from the diagonal.
int64_t window_bound(std::optional<int64_t> keys, const char* name) {
    if (!keys) return Problem::kUnbounded;
    if (*keys < 0) {
        throw InvalidArgument(std::string(name) + " is " + std::to_string(*keys) +
                              "; it must be at least 0, or absent for no bound");
    }
    return std::min(*keys, Problem::kUnbounded);
}

void require_output(const TensorView& t, const char* name) {
    if (t.read_only) {
        throw InvalidArgument(std::string(name) +
                              " is read-only; the result cannot be written into it");
    }
    if (shares_memory_with_itself(t)) {
        throw InvalidArgument(std::string(name) + " has shape " + describe(t.shape, t.ndim) +
                              " and strides " + describe(t.strides, t.ndim) +
                              ": several elements share one address (an expanded tensor); an "
                              "output must have an address for each");
    }
}

// Rows may be read and written as 16-byte vectors.
bool is_aligned16(const TensorView& t) {
    const int64_t vector = 16 / size_of(t.dtype);
    bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.shape[3] % vector == 0;
    for (int i = 0; i < 3; ++i)
        aligned = aligned && (t.shape[i] <= 1 || t.strides[i] % vector == 0);
    return aligned;
}

// The rules of cuTensorMapEncodeTiled for a map of 4 dimensions; an empty tensor needs none.
bool is_tma_addressable(const TensorView& t) {
    const bool empty = t.shape[0] * t.shape[1] == 0 || t.shape[2] * t.shape[3] == 0;
    const int64_t vector = 16 / size_of(t.dtype), limit = (int64_t{1} << 40) / size_of(t.dtype);
    bool legal = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
    for (int i = 0; i < 3; ++i) {
        const int64_t stride = t.strides[i];
        legal &= t.shape[i] == 1 || (stride > 0 && stride < limit && stride % vector == 0);
    }
    return empty || legal;
}

}  // namespace

int64_t Problem::visible_pairs() const {
    // Pairs with j <= i + bound: query i has clamp(i + bound + 1, 0, seqlen_k) of them: none, a
    // ramp, then all.
    const auto pairs_up_to = [&](int64_t bound) {
        const int64_t first = std::clamp<int64_t>(-bound, 0, seqlen_q);  // that has one
        const int64_t all = std::clamp<int64_t>(seqlen_k - 1 - bound, first, seqlen_q);
        const int64_t ramp = all - first;
        const int64_t ramp_pairs = ramp * (first + bound + 1) + ramp * (ramp - 1) / 2;
        return ramp_pairs + (seqlen_q - all) * seqlen_k;
    };
    const int64_t pairs = pairs_up_to(mask_right) - pairs_up_to(mask_left - 1);
    return batch * num_heads * std::max<int64_t>(pairs, 0);
}

Params make_params(const TensorView& q, const TensorView& k, const TensorView& v,
                   const TensorView& o, const TensorView* lse, const Options& options) {
    const Axes aq = axes_of(q, "q", options.layout);
    const Axes ak = axes_of(k, "k", options.layout);
    const Axes av = axes_of(v, "v", options.layout);
    const Axes ao = axes_of(o, "out", options.layout);

    if (q.dtype == DType::kInt32 || q.dtype == DType::kBool) {
        throw InvalidType(std::string("q has dtype ") + name_of(q.dtype) +
                          "; it must be float32, float16 or bfloat16");
    }
    require_like_q(k, "k", q);
    require_like_q(v, "v", q);
    require_like_q(o, "out", q);

    require_same("batch", "k", ak.batch, "q", aq.batch);
    require_same("batch", "v", av.batch, "q", aq.batch);
    require_same("head_dim", "k", ak.dim, "q", aq.dim);
    require_same("seqlen", "v", av.rows, "k", ak.rows);
    require_same("heads", "v", av.heads, "k", ak.heads);
    if (aq.dim < 1) throw InvalidArgument("q has head_dim 0; it must be at least 1");
    if (av.dim < 1) throw InvalidArgument("v has head_dim 0; it must be at least 1");
    if (ak.heads == 0 ? aq.heads != 0 : aq.heads % ak.heads != 0) {
        throw InvalidArgument("k has " + std::to_string(ak.heads) + " heads and q has " +
                              std::to_string(aq.heads) +
                              "; the heads of q must be a multiple of the heads of k and v");
    }
    require_same("batch", "out", ao.batch, "q", aq.batch);
    require_same("heads", "out", ao.heads, "q", aq.heads);
    require_same("seqlen", "out", ao.rows, "q", aq.rows);
    require_same("head_dim", "out", ao.dim, "v", av.dim);
    require_output(o, "out");

    Params params;
    Problem& p = params.problem;
    Tensors& t = params.tensors;
    const int64_t logits[4] = {aq.batch, aq.heads, aq.rows, ak.rows};
    if (const TensorView* bias = options.bias) {
        if (bias->dtype != DType::kFloat32 && bias->dtype != q.dtype) {
            throw InvalidType(std::string("bias has dtype ") + name_of(bias->dtype) +
                              "; it must be float32 or the dtype of q, " + name_of(q.dtype));
        }
        const BroadcastStrides s = broadcast_strides(*bias, "bias", q, logits);
        p.dtype_bias = bias->dtype;
        t.bias_ptr = bias->data;
        t.bias_batch_stride = s.batch, t.bias_head_stride = s.head;
        t.bias_row_stride = s.row, t.bias_key_stride = s.key;
    }
    if (const TensorView* mask = options.mask) {
        if (mask->dtype != DType::kBool) {
            throw InvalidType(std::string("mask has dtype ") + name_of(mask->dtype) +
                              "; it must be bool (true: the query sees the key); an array to add "
                              "to the logits is a bias");
        }
        const BroadcastStrides s = broadcast_strides(*mask, "mask", q, logits);
        t.mask_ptr = static_cast<const uint8_t*>(mask->data);
        t.mask_batch_stride = s.batch, t.mask_head_stride = s.head;
        t.mask_row_stride = s.row, t.mask_key_stride = s.key;
    }
    if (const TensorView* lengths = options.seqlens_k) {
        if (lengths->dtype != DType::kInt32) {
            throw InvalidType(std::string("seqlens_k has dtype ") + name_of(lengths->dtype) +
                              "; it must be int32");
        }
        require_device(*lengths, "seqlens_k", q);
        if (lengths->ndim != 1 || lengths->shape[0] != aq.batch) {
            throw InvalidArgument("seqlens_k has shape " +
                                  describe(lengths->shape, std::min(lengths->ndim, kMaxDims)) +
                                  "; it must have one entry for each batch entry: (" +
                                  std::to_string(aq.batch) + ",)");
        }
        if (aq.batch > 0 && lengths->data == nullptr) {
            throw InvalidArgument("seqlens_k has no data (a null pointer)");
        }
        require_element_alignment(*lengths, "seqlens_k");
        t.seqlens_k_ptr = static_cast<const int32_t*>(lengths->data);
        t.seqlens_k_stride = lengths->strides[0];
    }

    const struct {
        const char* name;
        const TensorView* view;
    } inputs[] = {{"q", &q},
                  {"k", &k},
                  {"v", &v},
                  {"bias", options.bias},
                  {"mask", options.mask},
                  {"seqlens_k", options.seqlens_k}};
    for (const auto& input : inputs) {
        if (input.view != nullptr && share_memory(o, *input.view)) {
            throw InvalidArgument(std::string("out overlaps ") + input.name +
                                  " in memory; kernels write while they read");
        }
    }

    if (lse != nullptr) {
        const int64_t expected[3] = {aq.batch, aq.heads, aq.rows};
        if (lse->dtype != DType::kFloat32) {
            throw InvalidType(std::string("lse has dtype ") + name_of(lse->dtype) +
                              "; it must be float32");
        }
        require_device(*lse, "lse", q);
        const bool is_empty = expected[0] * expected[1] == 0 || expected[2] == 0;
        int64_t dense = 1;
        bool fits = lse->ndim == 3;
        for (int i = 2; fits && i >= 0; --i) {
            fits = lse->shape[i] == expected[i] &&
                   (is_empty || expected[i] <= 1 || lse->strides[i] == dense);
            dense *= expected[i];
        }
        if (!fits) {
            const int ndim = std::min(lse->ndim, kMaxDims);
            throw InvalidArgument("lse has " + std::to_string(lse->ndim) + " dimensions, shape " +
                                  describe(lse->shape, ndim) + " and strides " +
                                  describe(lse->strides, ndim) +
                                  "; it must be contiguous with shape (batch, heads, seqlen_q) = " +
                                  describe(expected, 3));
        }
        require_output(*lse, "lse");
        if (share_memory(*lse, o)) throw InvalidArgument("lse overlaps out in memory");
        for (const auto& input : inputs) {
            if (input.view != nullptr && share_memory(*lse, *input.view)) {
                throw InvalidArgument(std::string("lse overlaps ") + input.name + " in memory");
            }
        }
    }

    const float default_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(aq.dim)));
    const float softmax_scale = options.softmax_scale.value_or(default_scale);
    if (!std::isfinite(softmax_scale)) {
        throw InvalidArgument("softmax_scale is " + std::to_string(softmax_scale) +
                              "; it must be finite");
    }

    if (options.softcap != 0 &&
        !(options.softcap >= kMinSoftcap && options.softcap <= kMaxSoftcap)) {
        std::ostringstream value;
        value << options.softcap;
        throw InvalidArgument("softcap is " + value.str() +
                              "; it must be 0 (none) or between 1e-20 and 1e20");
    }

    p.batch = aq.batch;
    p.num_heads = aq.heads;
    p.num_heads_kv = ak.heads;
    p.seqlen_q = aq.rows;
    p.seqlen_k = ak.rows;
    p.head_dim = aq.dim;
    p.head_dim_v = av.dim;
    p.device = q.device.type;
    p.dtype_q = q.dtype;
    p.dtype_kv = k.dtype;
    p.dtype_o = o.dtype;
    p.softmax_scale = softmax_scale;
    p.softcap = options.softcap;
    const bool bottom_right = options.align == Align::kBottomRight;
    const int64_t diagonal = bottom_right ? ak.rows - aq.rows : 0;
    const int64_t left = window_bound(options.window_left, "window_left");
    int64_t right = window_bound(options.window_right, "window_right");
    if (options.causal) right = std::min<int64_t>(right, 0);
    if (left != Problem::kUnbounded) p.mask_left = diagonal - left;
    if (right != Problem::kUnbounded) p.mask_right = diagonal + right;
    p.has_bias = options.bias != nullptr;
    p.has_mask = options.mask != nullptr;
    p.has_seqlens_k = options.seqlens_k != nullptr;
    p.diagonal_follows_seqlens_k = p.has_seqlens_k && bottom_right;
    p.aligned16 = is_aligned16(q) && is_aligned16(k) && is_aligned16(v) && is_aligned16(o);
    p.tma = is_tma_addressable(q) && is_tma_addressable(k) && is_tma_addressable(v);

    t.q_ptr = q.data;
    t.k_ptr = k.data;
    t.v_ptr = v.data;
    t.o_ptr = o.data;
    t.lse_ptr = lse != nullptr ? static_cast<float*>(lse->data) : nullptr;
    t.q_batch_stride = aq.batch_stride, t.q_head_stride = aq.head_stride;
    t.k_batch_stride = ak.batch_stride, t.k_head_stride = ak.head_stride;
    t.v_batch_stride = av.batch_stride, t.v_head_stride = av.head_stride;
    t.o_batch_stride = ao.batch_stride, t.o_head_stride = ao.head_stride;
    t.q_row_stride = aq.row_stride, t.k_row_stride = ak.row_stride;
    t.v_row_stride = av.row_stride, t.o_row_stride = ao.row_stride;
    t.device_index = q.device.index;

    return params;
}

}  // namespace fa101
