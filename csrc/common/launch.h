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

// Call right after a launch. Grids are one-dimensional everywhere: batch * heads * tiles in x,
// whose limit is 2^31 - 1 where y and z stop at 65535.
inline void check_launch(const char* name, int64_t grid, int threads, int smem_bytes) {
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        throw CudaError(std::string(name) + "<<<" + std::to_string(grid) + ", " +
                        std::to_string(threads) + ", " + std::to_string(smem_bytes) +
                        ">>>: " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
    }
}

inline int count_sms(int device_index) {
    int num_sms = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device_index),
               "cudaDevAttrMultiProcessorCount");
    return num_sms;
}

// Whether the kernel's code for the current device waits by itself (dependent.cuh), as what is
// compiled for sm_90 does, so that its launch need not (device_info_cuda.cpp).
bool waits_by_itself(const void* kernel, const char* name);

// A launch; if `early`, of a kernel that waits by itself: it overlaps the end of what is before it
// on the stream.
template <class... Params>
void launch_dependent(bool early, void (*kernel)(Params...), const char* name, int64_t grid,
                      int threads, int smem_bytes, void* stream, const Params&... params) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    early = early && waits_by_itself(reinterpret_cast<const void*>(kernel), name);
    config.numAttrs = early ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, params...);
    check_launch(name, grid, threads, smem_bytes);
}

}  // namespace fa101
