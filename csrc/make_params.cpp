// [2] Every check on user input. Below this file nothing is checked again.
#include <fa101/error.h>
#include <fa101/kv_cache.h>
#include <fa101/params.h>

#include "common/key_rows.h"
#include "overlap.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <tuple>

namespace fa101 {
namespace {

// Kernels count rows and blocks in 32 bits (offsets are 64-bit), with room for what a
// kernel looks ahead.
constexpr int64_t kMaxSeqlen = std::numeric_limits<int32_t>::max() - 8192;

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

void require_device(const TensorView& t, const char* name, const TensorView& other,
                    const char* other_name = "q") {
    if (t.device != other.device) {
        throw InvalidArgument(std::string(name) + " is on " + describe(t.device) + " but " +
                              other_name + " is on " + describe(other.device) +
                              "; all tensors must be on one device");
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

void require_like(const TensorView& t, const char* name, const TensorView& other,
                  const char* other_name = "q") {
    if (t.dtype != other.dtype) {
        throw InvalidType(std::string(name) + " has dtype " + name_of(t.dtype) + " but " +
                          other_name + " has dtype " + name_of(other.dtype) +
                          "; they must be equal");
    }
    require_device(t, name, other, other_name);
}

void require_float(const TensorView& t, const char* name) {
    if (t.dtype != DType::kFloat32 && t.dtype != DType::kFloat16 && t.dtype != DType::kBFloat16) {
        throw InvalidType(std::string(name) + " has dtype " + name_of(t.dtype) +
                          "; it must be float32, float16 or bfloat16");
    }
}

bool is_fp8(const TensorView& t) { return t.dtype == DType::kFloat8E4M3; }

// `t` goes with a cache in fp8, whose products are of 16 bits.
void require_half(const TensorView& t, const char* name, const char* cache) {
    if (t.dtype != DType::kFloat16 && t.dtype != DType::kBFloat16) {
        throw InvalidType(std::string(name) + " has dtype " + name_of(t.dtype) + " and " + cache +
                          " float8_e4m3fn; with that it must be float16 or bfloat16");
    }
}

void require_data(const TensorView& t, const char* name) {
    int64_t size = 1;
    for (int i = 0; i < t.ndim; ++i) size *= t.shape[i];
    if (size != 0 && t.data == nullptr) {
        throw InvalidArgument(std::string(name) + " has no data (a null pointer)");
    }
    require_element_alignment(t, name);
}

void require_int32(const TensorView& t, const char* name) {
    if (t.dtype != DType::kInt32) {
        throw InvalidType(std::string(name) + " has dtype " + name_of(t.dtype) +
                          "; it must be int32");
    }
}

void require_lengths(const TensorView& lengths, int64_t batch, const TensorView& other,
                     const char* other_name = "q") {
    require_int32(lengths, "seqlens_k");
    require_device(lengths, "seqlens_k", other, other_name);
    if (lengths.ndim != 1 || lengths.shape[0] != batch) {
        throw InvalidArgument(
            "seqlens_k has shape " + describe(lengths.shape, std::min(lengths.ndim, kMaxDims)) +
            "; it must have one entry for each batch entry: (" + std::to_string(batch) + ",)");
    }
    require_data(lengths, "seqlens_k");
}

// What to multiply the heads of `cache` by; `other` tells the device.
Descale descale_of(const TensorView* view, const char* name, const TensorView& cache,
                   const char* cache_name, int64_t batch, int64_t heads, const TensorView& other,
                   const char* other_name) {
    if (view == nullptr) return {};
    const TensorView& t = *view;
    if (!is_fp8(cache)) {
        throw InvalidArgument(std::string(name) + " is given but " + cache_name + " has dtype " +
                              name_of(cache.dtype) + "; only float8_e4m3fn has a descale");
    }
    if (t.dtype != DType::kFloat32) {
        throw InvalidType(std::string(name) + " has dtype " + name_of(t.dtype) +
                          "; it must be float32");
    }
    require_device(t, name, other, other_name);
    const bool by_head = t.ndim == 1 && t.shape[0] == heads;
    if (!by_head && (t.ndim != 2 || t.shape[0] != batch || t.shape[1] != heads)) {
        throw InvalidArgument(std::string(name) + " has shape " +
                              describe(t.shape, std::min(t.ndim, kMaxDims)) +
                              "; it must have one entry for each head of " + cache_name + ", (" +
                              std::to_string(heads) + ",), or for each batch entry and head, (" +
                              std::to_string(batch) + ", " + std::to_string(heads) + ")");
    }
    require_data(t, name);
    return {static_cast<const float*>(t.data), by_head ? 0 : t.strides[0],
            by_head ? t.strides[0] : t.strides[1]};
}

// K and V, or the pages of both: as many heads, rows and batch entries.
void require_same_cache(const Axes& ak, const char* k_name, const Axes& av, const char* v_name) {
    require_same("batch", v_name, av.batch, k_name, ak.batch);
    require_same("seqlen", v_name, av.rows, k_name, ak.rows);
    require_same("heads", v_name, av.heads, k_name, ak.heads);
}

struct PageTable {
    const int32_t* table = nullptr;
    int64_t stride = 0, max_pages = 0, num_pages = 0, page_size = 0;

    int64_t capacity() const { return max_pages * page_size; }
};

// `cache` is the axes of k, whose rows are a page's and whose batch entries are the pages.
PageTable page_table_of(const TensorView* view, const Axes& cache, const char* k_name,
                        int64_t batch, const TensorView& other, const char* other_name = "q") {
    if (view == nullptr) return {};
    const TensorView& t = *view;
    require_int32(t, "page_table");
    require_device(t, "page_table", other, other_name);
    if (t.ndim != 2 || t.shape[0] != batch) {
        throw InvalidArgument("page_table has shape " +
                              describe(t.shape, std::min(t.ndim, kMaxDims)) +
                              "; it must have a row of pages for each batch entry: (" +
                              std::to_string(batch) + ", max_pages)");
    }
    if (t.shape[1] > 1 && t.strides[1] != 1) {
        throw InvalidArgument("page_table has strides " + describe(t.strides, 2) +
                              "; its last axis must be contiguous, stride 1");
    }
    require_data(t, "page_table");
    const int64_t page_size = cache.rows;
    if (page_size < kMinPageSize || (page_size & (page_size - 1)) != 0) {
        throw InvalidArgument(std::string(k_name) + " has pages of " + std::to_string(page_size) +
                              " keys; the page size must be a power of two from " +
                              std::to_string(kMinPageSize) + " on");
    }
    PageTable pages{static_cast<const int32_t*>(t.data), t.strides[0], t.shape[1], cache.batch,
                    page_size};
    if (pages.max_pages > kMaxSeqlen / page_size) {
        throw InvalidArgument("page_table has " + std::to_string(pages.max_pages) + " pages of " +
                              std::to_string(page_size) + " keys for a batch entry; at most " +
                              std::to_string(kMaxSeqlen) + " keys are supported");
    }
    if (cache.batch > kMaxSeqlen) {
        throw InvalidArgument(std::string(k_name) + " has " + std::to_string(cache.batch) +
                              " pages; at most " + std::to_string(kMaxSeqlen) + " are supported");
    }
    if (cache.batch == 0 && batch * pages.max_pages > 0) {
        throw InvalidArgument("page_table has shape " + describe(t.shape, 2) + " but " + k_name +
                              " has no page");
    }
    return pages;
}

void require_room_for(int64_t seqlen_new, int64_t capacity, const char* cache) {
    if (seqlen_new < 0 || seqlen_new > capacity) {
        throw InvalidArgument("k has " + std::to_string(seqlen_new) + " new keys; " + cache +
                              " has room for " + std::to_string(capacity) + " of each batch entry");
    }
}

// The strides with which bias or mask is read as (batch, heads, seqlen_q, seqlen_k).
struct BroadcastStrides {
    int64_t batch, head, row, key;
};

BroadcastStrides broadcast_strides(const TensorView& t, const char* name, const TensorView& q,
                                   const int64_t (&target)[4]) {
    require_device(t, name, q);
    bool fits = t.ndim >= 2 && t.ndim <= 4;
    int64_t strides[4] = {};
    for (int i = 0; fits && i < t.ndim; ++i) {
        const int axis = 4 - t.ndim + i;
        fits = t.shape[i] == target[axis] || t.shape[i] == 1;
        strides[axis] = t.shape[i] == 1 ? 0 : t.strides[i];
    }
    if (!fits) {
        throw InvalidArgument(std::string(name) + " has " + std::to_string(t.ndim) +
                              " dimensions, shape " +
                              describe(t.shape, std::min(t.ndim, kMaxDims)) +
                              "; it must have 2 to 4 axes that broadcast to (batch, heads, "
                              "seqlen_q, seqlen_k) = " +
                              describe(target, 4));
    }
    require_data(t, name);
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
        throw InvalidArgument(std::string(name) + " is read-only; this call would write into it");
    }
    if (shares_memory_with_itself(t)) {
        throw InvalidArgument(std::string(name) + " has shape " + describe(t.shape, t.ndim) +
                              " and strides " + describe(t.strides, t.ndim) +
                              ": several elements share one address (an expanded tensor); an "
                              "output must have an address for each");
    }
}

// cos or sin of a rotary embedding: (positions, rotary_dim / 2).
void require_rotary(const TensorView& t, const char* name, const TensorView& k,
                    const TensorView& k_cache, int64_t head_dim, int64_t capacity) {
    if (t.dtype != DType::kFloat32 && t.dtype != k.dtype) {
        throw InvalidType(std::string(name) + " has dtype " + name_of(t.dtype) +
                          "; it must be float32 or the dtype of k, " + name_of(k.dtype));
    }
    require_device(t, name, k_cache, "k_cache");
    if (t.ndim != 2 || t.shape[0] < std::max<int64_t>(capacity, 1) || 2 * t.shape[1] > head_dim) {
        throw InvalidArgument(std::string(name) + " has shape " +
                              describe(t.shape, std::min(t.ndim, kMaxDims)) +
                              "; it must be (positions, rotary_dim / 2) with a position for each "
                              "of the " +
                              std::to_string(capacity) +
                              " keys that k_cache has room for and rotary_dim at most the "
                              "head_dim, " +
                              std::to_string(head_dim));
    }
    if (t.shape[1] > 1 && t.strides[1] != 1) {
        throw InvalidArgument(std::string(name) + " has strides " + describe(t.strides, 2) +
                              "; its last axis must be contiguous, stride 1");
    }
    require_data(t, name);
}

RowCopy row_copy(const TensorView& src, const Axes& from, const TensorView& dst, const Axes& to) {
    RowCopy rows;
    rows.src_ptr = src.data, rows.dst_ptr = dst.data;
    rows.heads = from.heads, rows.rows = from.rows, rows.head_dim = from.dim;
    rows.src_batch_stride = from.batch_stride, rows.src_head_stride = from.head_stride;
    rows.src_row_stride = from.row_stride;
    rows.dst_batch_stride = to.batch_stride, rows.dst_head_stride = to.head_stride;
    rows.dst_row_stride = to.row_stride;
    return rows;
}

// Rows may be read and written as 16-byte vectors.
bool is_aligned16(const TensorView& t) {
    const int64_t vector = 16 / size_of(t.dtype);
    bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.shape[3] % vector == 0;
    for (int i = 0; i < 3; ++i)
        aligned = aligned && (t.shape[i] <= 1 || t.strides[i] % vector == 0);
    return aligned;
}

// The rules of cuTensorMapEncodeTiled; an empty tensor needs none.
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

bool Problem::operator==(const Problem& other) const {
    const auto fields = [](const Problem& p) {
        return std::tie(p.batch, p.num_heads, p.num_heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim,
                        p.head_dim_v, p.device, p.dtype_q, p.dtype_kv, p.dtype_o, p.softmax_scale,
                        p.softcap, p.mask_left, p.mask_right, p.has_bias, p.has_mask,
                        p.has_seqlens_k, p.dtype_bias, p.seqlen_new, p.page_size, p.num_splits,
                        p.diagonal_follows_seqlens_k, p.aligned16, p.tma);
    };
    return fields(*this) == fields(other);
}

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
    const char *const k_name = options.k_name, *const v_name = options.v_name;
    const Axes aq = axes_of(q, "q", options.layout);
    const Axes ak = axes_of(k, k_name, options.layout);
    const Axes av = axes_of(v, v_name, options.layout);
    const Axes ao = axes_of(o, "out", options.layout);

    require_float(q, "q");
    if (is_fp8(k)) {
        require_half(q, "q", k_name);
        require_device(k, k_name, q);
        require_like(v, v_name, k, k_name);
    } else {
        require_like(k, k_name, q);
        require_like(v, v_name, q);
    }
    require_like(o, "out", q);

    const PageTable pages = page_table_of(options.page_table, ak, k_name, aq.batch, q);
    if (options.page_table == nullptr) require_same("batch", k_name, ak.batch, "q", aq.batch);
    require_same("head_dim", k_name, ak.dim, "q", aq.dim);
    require_same_cache(ak, k_name, av, v_name);
    const int64_t seqlen_k = options.page_table != nullptr ? pages.capacity() : ak.rows;
    if (aq.dim < 1) throw InvalidArgument("q has head_dim 0; it must be at least 1");
    if (av.dim < 1)
        throw InvalidArgument(std::string(v_name) + " has head_dim 0; it must be at least 1");
    if (ak.heads == 0 ? aq.heads != 0 : aq.heads % ak.heads != 0) {
        throw InvalidArgument(std::string(k_name) + " has " + std::to_string(ak.heads) +
                              " heads and q has " + std::to_string(aq.heads) +
                              "; the heads of q must be a multiple of the heads of " + k_name +
                              " and " + v_name);
    }
    require_room_for(options.seqlen_new, seqlen_k, k_name);
    if (options.num_splits < 0) {
        throw InvalidArgument("num_splits is " + std::to_string(options.num_splits) +
                              "; it must be at least 1, or 0 for as many as fit");
    }
    require_same("batch", "out", ao.batch, "q", aq.batch);
    require_same("heads", "out", ao.heads, "q", aq.heads);
    require_same("seqlen", "out", ao.rows, "q", aq.rows);
    require_same("head_dim", "out", ao.dim, v_name, av.dim);
    require_output(o, "out");

    Params params;
    Problem& p = params.problem;
    Tensors& t = params.tensors;
    const int64_t logits[4] = {aq.batch, aq.heads, aq.rows, seqlen_k};
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
        require_lengths(*lengths, aq.batch, q);
        t.seqlens_k_ptr = static_cast<const int32_t*>(lengths->data);
        t.seqlens_k_stride = lengths->strides[0];
    } else if (options.seqlen_new > 0) {
        throw InvalidArgument("seqlens_k is absent; with new keys it must say where they went");
    }
    t.k_descale = descale_of(options.k_descale, "k_descale", k, k_name, aq.batch, ak.heads, q, "q");
    t.v_descale = descale_of(options.v_descale, "v_descale", v, v_name, aq.batch, ak.heads, q, "q");

    const struct {
        const char* name;
        const TensorView* view;
    } inputs[] = {{"q", &q},
                  {k_name, &k},
                  {v_name, &v},
                  {"bias", options.bias},
                  {"mask", options.mask},
                  {"seqlens_k", options.seqlens_k},
                  {"page_table", options.page_table},
                  {"k_descale", options.k_descale},
                  {"v_descale", options.v_descale}};
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
    p.seqlen_k = seqlen_k;
    p.head_dim = aq.dim;
    p.head_dim_v = av.dim;
    p.device = q.device.type;
    p.dtype_q = q.dtype;
    p.dtype_kv = k.dtype;
    p.dtype_o = o.dtype;
    p.softmax_scale = softmax_scale;
    p.softcap = options.softcap;
    const bool bottom_right = options.align == Align::kBottomRight;
    const int64_t diagonal = bottom_right ? seqlen_k - aq.rows : 0;
    const int64_t left = window_bound(options.window_left, "window_left");
    int64_t right = window_bound(options.window_right, "window_right");
    if (options.causal) right = std::min<int64_t>(right, 0);
    if (left != Problem::kUnbounded) p.mask_left = diagonal - left;
    if (right != Problem::kUnbounded) p.mask_right = diagonal + right;
    p.has_bias = options.bias != nullptr;
    p.has_mask = options.mask != nullptr;
    p.has_seqlens_k = options.seqlens_k != nullptr;
    p.seqlen_new = options.seqlen_new;
    p.page_size = pages.page_size;
    p.num_splits = options.num_splits;
    p.diagonal_follows_seqlens_k = p.has_seqlens_k && bottom_right;
    p.aligned16 = is_aligned16(q) && is_aligned16(k) && is_aligned16(v) && is_aligned16(o);
    p.tma = p.page_size == 0 && is_tma_addressable(q) && is_tma_addressable(k) &&
            is_tma_addressable(v) && is_tma_addressable(o);

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
    t.page_table_ptr = pages.table, t.page_table_stride = pages.stride;
    t.num_pages = pages.num_pages;
    t.device_index = q.device.index;

    return params;
}

AppendParams make_append_params(const TensorView& k, const TensorView& v, const TensorView& k_cache,
                                const TensorView& v_cache, const AppendOptions& options) {
    const Axes ak = axes_of(k, "k", options.layout), av = axes_of(v, "v", options.layout);
    const Axes to_k = axes_of(k_cache, "k_cache", options.layout);
    const Axes to_v = axes_of(v_cache, "v_cache", options.layout);
    require_like(v_cache, "v_cache", k_cache, "k_cache");
    if (is_fp8(k_cache)) {
        require_half(k, "k", "k_cache");
        require_device(k, "k", k_cache, "k_cache");
        require_like(v, "v", k, "k");
    } else {
        require_float(k_cache, "k_cache");
        require_like(k, "k", k_cache, "k_cache");
        require_like(v, "v", k_cache, "k_cache");
    }
    if (options.page_table == nullptr) {
        require_same("batch", "k", ak.batch, "k_cache", to_k.batch);
    }
    if (options.q != nullptr && options.q->ndim == 4) {  // else make_params refuses it
        require_same("batch", "k", ak.batch, "q", options.q->shape[0]);
    }
    require_same("heads", "k", ak.heads, "k_cache", to_k.heads);
    require_same("head_dim", "k", ak.dim, "k_cache", to_k.dim);
    require_same("head_dim", "v", av.dim, "v_cache", to_v.dim);
    require_same_cache(ak, "k", av, "v");
    require_same_cache(to_k, "k_cache", to_v, "v_cache");
    const PageTable pages =
        page_table_of(options.page_table, to_k, "k_cache", ak.batch, k_cache, "k_cache");
    const int64_t capacity = options.page_table != nullptr ? pages.capacity() : to_k.rows;
    require_room_for(ak.rows, capacity, "k_cache");
    if (options.seqlens_k == nullptr) {
        throw InvalidArgument("seqlens_k is absent; with new keys it must say where they go");
    }
    require_lengths(*options.seqlens_k, ak.batch, k_cache, "k_cache");

    AppendParams p;
    p.device = k_cache.device;
    p.dtype = k.dtype;
    p.dtype_cache = k_cache.dtype;
    p.batch = ak.batch;
    p.capacity = capacity;
    p.page_size = pages.page_size, p.num_pages = pages.num_pages;
    p.page_table_ptr = pages.table, p.page_table_stride = pages.stride;
    p.seqlens_k_ptr = static_cast<const int32_t*>(options.seqlens_k->data);
    p.seqlens_k_stride = options.seqlens_k->strides[0];
    p.k = row_copy(k, ak, k_cache, to_k);
    p.v = row_copy(v, av, v_cache, to_v);
    p.k.descale = descale_of(options.k_descale, "k_descale", k_cache, "k_cache", ak.batch, ak.heads,
                             k_cache, "k_cache");
    p.v.descale = descale_of(options.v_descale, "v_descale", v_cache, "v_cache", ak.batch, ak.heads,
                             k_cache, "k_cache");
    p.aligned16 =
        is_aligned16(k) && is_aligned16(v) && is_aligned16(k_cache) && is_aligned16(v_cache);

    const TensorView *const cos = options.cos, *const sin = options.sin;
    if ((cos == nullptr) != (sin == nullptr)) {
        throw InvalidArgument("cos and sin must both be there or both be absent");
    }
    if (cos != nullptr) {
        require_rotary(*cos, "cos", k, k_cache, ak.dim, capacity);
        require_rotary(*sin, "sin", k, k_cache, ak.dim, capacity);
        if (sin->dtype != cos->dtype || sin->shape[0] != cos->shape[0] ||
            sin->shape[1] != cos->shape[1]) {
            throw InvalidArgument("sin has shape " + describe(sin->shape, 2) + " and dtype " +
                                  name_of(sin->dtype) + " but cos has " + describe(cos->shape, 2) +
                                  " and " + name_of(cos->dtype) + "; they must be equal");
        }
        p.dtype_rotary = cos->dtype;
        p.rotary_dim = 2 * cos->shape[1];
        p.num_positions = cos->shape[0];
        p.cos_ptr = cos->data, p.sin_ptr = sin->data;
        p.cos_stride = cos->strides[0], p.sin_stride = sin->strides[0];
        p.interleaved = options.interleaved;
    }
    const TensorView *const q = options.q, *const q_rotated = options.q_rotated;
    if (q_rotated != nullptr && (q == nullptr || cos == nullptr)) {
        throw InvalidArgument("q_rotated needs q and cos: q is rotated into it");
    }
    if (q_rotated != nullptr) {
        const Axes aq = axes_of(*q, "q", options.layout);
        const Axes to_q = axes_of(*q_rotated, "q_rotated", options.layout);
        require_like(*q, "q", k, "k");
        require_like(*q_rotated, "q_rotated", k, "k");
        require_same("batch", "q", aq.batch, "k", ak.batch);
        require_same("head_dim", "q", aq.dim, "k_cache", to_k.dim);
        require_same("batch", "q_rotated", to_q.batch, "q", aq.batch);
        require_same("heads", "q_rotated", to_q.heads, "q", aq.heads);
        require_same("seqlen", "q_rotated", to_q.rows, "q", aq.rows);
        require_same("head_dim", "q_rotated", to_q.dim, "q", aq.dim);
        p.q = row_copy(*q, aq, *q_rotated, to_q);
        p.queries_advance = options.queries_advance;
    }

    // What is written must have a place for each element and be nobody's input.
    struct Named {
        const char* name;
        const TensorView* view;
    };
    const Named inputs[] = {{"k", &k},
                            {"v", &v},
                            {"seqlens_k", options.seqlens_k},
                            {"page_table", options.page_table},
                            {"k_descale", options.k_descale},
                            {"v_descale", options.v_descale},
                            {"cos", cos},
                            {"sin", sin},
                            {"q", q}};
    // make_params has yet to count the axes of out, lse and q.
    const auto meet = [](const TensorView& a, const TensorView& b) {
        return a.ndim <= kMaxDims && b.ndim <= kMaxDims && share_memory(a, b);
    };
    for (const Named& output :
         {Named{"k_cache", &k_cache}, {"v_cache", &v_cache}, {"q_rotated", q_rotated}}) {
        if (output.view == nullptr) continue;
        require_output(*output.view, output.name);
        for (const Named& input : inputs) {
            if (input.view != nullptr && meet(*output.view, *input.view)) {
                throw InvalidArgument(std::string(output.name) + " overlaps " + input.name +
                                      " in memory; it is written while the other is read");
            }
        }
    }
    for (const Named& output : {Named{"out", options.out}, {"lse", options.lse}}) {
        if (output.view == nullptr) continue;
        for (const Named& input : inputs) {
            if (input.view != nullptr && meet(*output.view, *input.view)) {
                throw InvalidArgument(std::string(output.name) + " overlaps " + input.name +
                                      " in memory; an output must be no input of the call");
            }
        }
    }
    if (share_memory(k_cache, v_cache)) {
        throw InvalidArgument("v_cache overlaps k_cache in memory; both are written");
    }
    return p;
}

}  // namespace fa101
