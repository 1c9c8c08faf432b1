// From a dtype known at run time to a type known at compile time; only for .cu files.
#pragma once

#include <fa101/error.h>
#include <fa101/tensor_view.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

namespace fa101 {

template <class T>
struct TypeTag {
    using Type = T;
};

// Calls run(TypeTag<T>{}) with the T that `dtype` names.
template <class Run>
void dispatch_dtype(DType dtype, const Run& run) {
    switch (dtype) {
        case DType::kFloat32:
            return run(TypeTag<float>{});
        case DType::kFloat16:
            return run(TypeTag<__half>{});
        case DType::kBFloat16:
            return run(TypeTag<__nv_bfloat16>{});
    }
    throw Unsupported("no kernel was compiled for dtype " +
                      std::to_string(static_cast<int>(dtype)));
}

}  // namespace fa101
