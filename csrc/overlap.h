// Do two arrays share memory? Asked of outputs, which kernels write while they read inputs.
#pragma once

#include <fa101/tensor_view.h>

namespace fa101 {

// True when some element of `a` shares a byte with some element of `b`. Arrays may interleave in
// one buffer (q, k, v and out as slices of it) without sharing any.
bool share_memory(const TensorView& a, const TensorView& b);

// True when two elements of `t` share a byte: an expanded axis, or strides that fold onto each
// other.
bool shares_memory_with_itself(const TensorView& t);

}  // namespace fa101
