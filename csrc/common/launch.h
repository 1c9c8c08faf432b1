// Checked launches: a failure throws CudaError with the kernel's name, CUDA's words and the sizes.
#pragma once

#include <fa101/error.h>

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace fa101 {

inline void check_cuda(cudaError_t status, const char* what) {
    if (status != cudaSuccess) {
        cudaGetLastError();  // clear it: the next call must not see this error
        throw CudaError(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                        cudaGetErrorString(status));
    }
}

// Raises the kernel's dynamic shared memory limit on the current device to smem_bytes, once
// (device_info_cuda.cpp).
void raise_shared_memory(const void* kernel, const char* name, int smem_bytes);

// The same where it needs more than the default 48 KB.
template <class Kernel>
void allow_shared_memory(Kernel kernel, const char* name, int smem_bytes) {
    if (smem_bytes > 48 * 1024) {
        raise_shared_memory(reinterpret_cast<const void*>(kernel), name, smem_bytes);
    }
}

// Call right after <<<>>>. Grids are one-dimensional everywhere: batch * heads * tiles in x, whose
// limit is 2^31 - 1 where y and z stop at 65535.
inline void check_launch(const char* name, int64_t grid, int threads, int smem_bytes) {
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        throw CudaError(std::string(name) + "<<<" + std::to_string(grid) + ", " +
                        std::to_string(threads) + ", " + std::to_string(smem_bytes) +
                        ">>>: " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
    }
}

}  // namespace fa101
