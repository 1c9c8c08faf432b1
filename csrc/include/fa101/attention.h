// The simple C++ entry: one call from arrays to result.
#pragma once

#include <fa101/device_info.h>
#include <fa101/error.h>
#include <fa101/params.h>
#include <fa101/plan.h>
#include <fa101/tensor_view.h>
#include <fa101/version.h>

namespace fa101 {

// Writes attention of q, k, v into o (and the log-sum-exp into lse unless null); shapes and rules
// in params.h. On CUDA the work is enqueued on `stream` and workspace, where a kernel needs any,
// comes from the stream-ordered allocator; make_params / plan / run give control over both.
FA101_EXPORT void attention(const TensorView& q, const TensorView& k, const TensorView& v,
                            const TensorView& o, const TensorView* lse = nullptr,
                            const Options& options = {}, Stream stream = nullptr);

}  // namespace fa101
