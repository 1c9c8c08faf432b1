// append() on the CPU, and the way to the GPU's.
#include "kv_cache.h"

#include <fa101/error.h>

#include "build_config.h"
#include "cpu/simd.h"
#include "device_info_cuda.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fa101 {
namespace {

void append_cpu(const AppendParams& p) {
    const SimdKernels& simd = simd_kernels(cpu_simd_level());
    const int64_t size = size_of(p.dtype), pairs = p.rotary_dim / 2;
    // load_rows fills whole vectors.
    std::vector<float> x(std::max(p.k.head_dim, p.v.head_dim) + kMaxVector);
    std::vector<float> cos(pairs + kMaxVector), sin(cos.size());
    for (int64_t index = 0; index < num_rows(p); ++index) {
        const RowJob job = row_job(p, index);
        if (!job.has_room) continue;
        const int64_t head_dim = job.copy->head_dim;
        const char* const src = static_cast<const char*>(job.copy->src_ptr) + job.src * size;
        char* const dst =
            static_cast<char*>(job.copy->dst_ptr) + job.dst * (job.is_quantised ? 1 : size);
        if (job.position < 0 && !job.is_quantised) {
            std::memcpy(dst, src, static_cast<size_t>(head_dim * size));
            continue;
        }
        const auto load = [&](DType dtype, const void* base, int64_t offset, int64_t n, auto& to) {
            simd.load_rows(dtype, static_cast<const char*>(base) + offset * size_of(dtype), 0, 1, 1,
                           n, nullptr, to.data(), 0);
        };
        load(p.dtype, src, 0, head_dim, x);
        if (job.position >= 0) {
            load(p.dtype_rotary, p.cos_ptr, job.position * p.cos_stride, pairs, cos);
            load(p.dtype_rotary, p.sin_ptr, job.position * p.sin_stride, pairs, sin);
            for (int64_t i = 0; i < pairs; ++i) {
                const RotaryPair at = rotary_pair(p, i);
                const Rotated r = rotate(x[at.x], x[at.y], cos[i], sin[i]);
                x[at.x] = r.x, x[at.y] = r.y;
            }
        }
        if (job.is_quantised) {
            for (int64_t i = 0; i < head_dim; ++i) {
                dst[i] = static_cast<char>(float_to_e4m3(x[i] / job.descale));
            }
            continue;
        }
        const float one = 1.0f;
        simd.store_rows(p.dtype, x.data(), 0, 1, head_dim, &one, dst, 0);
    }
}

}  // namespace

void append(const AppendParams& params, Stream stream) {
    if (num_rows(params) == 0) return;
    if (params.device.type == DeviceType::kCpu) return append_cpu(params);
#if FA101_HAS_CUDA
    const CudaDeviceGuard guard(params.device.index);
    append_cuda(params, stream);
#else
    (void)stream;
    throw CudaError("this build has no CUDA code; build with FA101_CUDA=ON");
#endif
}

}  // namespace fa101
