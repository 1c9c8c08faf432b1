#include "cpu/simd.h"

#include <fa101/device_info.h>

#include "build_config.h"

namespace fa101 {

const SimdKernels& simd_kernels(SimdLevel level) {
#if FA101_HAS_AVX512
    if (level == SimdLevel::kAvx512) return kSimdAvx512;
#endif
#if FA101_HAS_AVX2
    if (level == SimdLevel::kAvx2) return kSimdAvx2;
#endif
    static_cast<void>(level);
    return kSimdPortable;
}

}  // namespace fa101
