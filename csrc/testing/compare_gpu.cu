#include "common/launch.h"
#include "testing/compare.h"

namespace fa101::testing {
namespace {

__global__ void count_differences_kernel(const uint8_t* a, const uint8_t* b, int64_t bytes,
                                         unsigned* count) {
    unsigned found = 0;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes; i += step) {
        found += a[i] != b[i];
    }
    if (found > 0) atomicAdd(count, found);
}

}  // namespace

void count_differences_gpu(const void* a, const void* b, int64_t bytes, unsigned* count,
                           Stream stream) {
    constexpr int kThreads = 256, kGrid = 1024;
    count_differences_kernel<<<kGrid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const uint8_t*>(a), static_cast<const uint8_t*>(b), bytes, count);
    check_launch("count_differences_kernel", kGrid, kThreads, 0);
}

}  // namespace fa101::testing
