// What both versions of append() share: which row goes where, and the rotation of a pair.
#pragma once

#include <fa101/kv_cache.h>

#include "common/float8.h"
#include "common/host_device.h"
#include "common/mask.h"

#include <cstdint>

namespace fa101 {

inline int64_t num_rows(const AppendParams& p) {
    return p.batch * (p.k.heads * p.k.rows + p.v.heads * p.v.rows + p.q.heads * p.q.rows);
}

struct RowJob {
    const RowCopy* copy;
    int64_t src, dst;  // elements
    int64_t position;  // in cos and sin; -1: the row is not rotated
    bool has_room;
    bool is_quantised = false;  // to fp8, divided by descale
    float descale = 1.0f;
};

// The keys of batch entry `batch` that are there.
FA101_HOST_DEVICE int64_t num_cached(const AppendParams& p, int64_t batch) {
    return clamp_to<int64_t>(p.seqlens_k_ptr[batch * p.seqlens_k_stride], 0, p.capacity);
}

// One row of p.k, p.v or p.q.
FA101_HOST_DEVICE RowJob row_job(const AppendParams& p, const RowCopy* copy, int64_t batch,
                                 int64_t head, int64_t row) {
    const int64_t cached = num_cached(p, batch);
    RowJob job{copy, 0, head * copy->dst_head_stride, -1, true};
    job.src =
        batch * copy->src_batch_stride + head * copy->src_head_stride + row * copy->src_row_stride;
    if (copy == &p.q) {
        const int64_t position = cached + (p.queries_advance ? row : 0);
        job.position = position < p.num_positions ? position : p.num_positions - 1;
        job.dst += batch * copy->dst_batch_stride + row * copy->dst_row_stride;
        return job;
    }
    int64_t key = cached + row, entry = batch;
    job.has_room = key < p.capacity;
    if (p.dtype_cache == DType::kFloat8E4M3) {
        job.is_quantised = true;
        job.descale = descale_of(copy->descale, batch, head);
    }
    if (copy == &p.k && p.rotary_dim > 0) job.position = key;
    if (p.page_size > 0 && job.has_room) {
        entry = p.page_table_ptr[batch * p.page_table_stride + key / p.page_size];
        key %= p.page_size;
        job.has_room = 0 <= entry && entry < p.num_pages;
    }
    job.dst += entry * copy->dst_batch_stride + key * copy->dst_row_stride;
    return job;
}

// Row `index` of all: those of k, then v, then q; heads are innermost, as they often are in memory.
FA101_HOST_DEVICE RowJob row_job(const AppendParams& p, int64_t index) {
    const RowCopy* copy = &p.k;
    if (index >= p.batch * p.k.heads * p.k.rows) {
        index -= p.batch * p.k.heads * p.k.rows;
        copy = &p.v;
        if (index >= p.batch * p.v.heads * p.v.rows) {
            index -= p.batch * p.v.heads * p.v.rows;
            copy = &p.q;
        }
    }
    return row_job(p, copy, index / copy->heads / copy->rows, index % copy->heads,
                   index / copy->heads % copy->rows);
}

struct RotaryPair {
    int64_t x, y;  // columns
};
FA101_HOST_DEVICE RotaryPair rotary_pair(const AppendParams& p, int64_t i) {
    return p.interleaved ? RotaryPair{2 * i, 2 * i + 1} : RotaryPair{i, i + p.rotary_dim / 2};
}

struct Rotated {
    float x, y;
};
FA101_HOST_DEVICE Rotated rotate(float x, float y, float cos, float sin) {
    return {x * cos - y * sin, x * sin + y * cos};
}

void append_cuda(const AppendParams& params, Stream stream);  // in kv_cache.cu

}  // namespace fa101
