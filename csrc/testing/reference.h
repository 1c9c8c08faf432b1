// The oracle: attention as params.h defines it, in float64, written to be checked by eye.
#pragma once

#include <fa101/params.h>
#include <fa101/plan.h>

#include <cstdint>

namespace fa101::testing {

// Rows of every head that the oracle computes: 0, row_step, 2 * row_step, ...
constexpr int64_t num_rows(const Problem& problem, int64_t row_step) {
    return (problem.seqlen_q + row_step - 1) / row_step;
}

// o (batch, num_heads, num_rows, head_dim_v) and, unless null, lse (batch, num_heads, num_rows),
// both contiguous. The pointers in `tensors` are host memory; o_ptr and lse_ptr are not used.
void reference_attention(const Problem& problem, const Tensors& tensors, double* o, double* lse,
                         int num_threads, int64_t row_step = 1);

// The same on the current GPU, for device pointers throughout and k and v of q's dtype; only in a
// build with CUDA.
void reference_attention_gpu(const Problem& problem, const Tensors& tensors, double* o, double* lse,
                             Stream stream, int64_t row_step = 1);

}  // namespace fa101::testing
