// append() on the GPU: a warp takes a row. The rows of a few tokens are a few kilobytes a sequence
// and layer, so the time is that of a launch, whatever the code does.
#include "common/dispatch.h"
#include "common/launch.h"
#include "kv_cache.cuh"

#include <algorithm>
#include <cstdint>

namespace fa101 {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kWarps = kThreads / 32;
constexpr int64_t kMaxBlocks = 1 << 20;

template <class T>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendParams p, int64_t rows) {
    const int lane = threadIdx.x % 32;
    for (int64_t index = blockIdx.x * kWarps + threadIdx.x / 32; index < rows;
         index += gridDim.x * kWarps) {
        const RowJob job = row_job(p, index);
        if (!job.has_room) continue;
        const T* const src = static_cast<const T*>(job.copy->src_ptr) + job.src;
        const int64_t rotary_dim = job.position < 0 ? 0 : p.rotary_dim;
        for (int64_t i = lane; i < rotary_dim / 2; i += 32) {
            const auto angle = [&](const void* base, int64_t stride) {
                const int64_t element = job.position * stride + i;
                const int bytes = p.dtype_rotary == DType::kFloat32 ? 4 : 2;
                return to_float(static_cast<const char*>(base) + element * bytes, p.dtype_rotary);
            };
            const RotaryPair at = rotary_pair(p, i);
            const Rotated r =
                rotate(to_float(src[at.x]), to_float(src[at.y]), angle(p.cos_ptr, p.cos_stride),
                       angle(p.sin_ptr, p.sin_stride));
            put_column<T>(job, at.x, r.x);
            put_column<T>(job, at.y, r.y);
        }
        copy_columns<T>(p, job, rotary_dim, lane);
    }
}

}  // namespace

void append_cuda(const AppendParams& params, Stream stream) {
    const int64_t rows = num_rows(params);
    const int64_t grid = std::min(ceil_div(rows, kWarps), kMaxBlocks);
    dispatch_dtype(params.dtype, [&](auto tag) {
        append_kernel<typename decltype(tag)::Type>
            <<<static_cast<unsigned>(grid), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
                params, rows);
    });
    check_launch("append_kernel", grid, kThreads, 0);
}

}  // namespace fa101
