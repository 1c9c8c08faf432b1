// Which head_dim tiles of the CuTe kernels are part of this build.
#pragma once

#include "build_config.h"

#include <initializer_list>

namespace fa101 {

// Chosen by FA101_HEAD_DIMS.
constexpr bool is_compiled(int head_dim) {
    for (int dim : {FA101_HEAD_DIM_LIST}) {
        if (dim == head_dim) return true;
    }
    return false;
}

}  // namespace fa101
