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

// Makes the kernel ready, on the current device, for blocks of so much dynamic shared memory, and
// says whether its code there waits by itself (dependent.cuh), as what is compiled for sm_90 does,
// so that its launch need not (device_info_cuda.cpp).
bool prepare_kernel(const void* kernel, const char* name, int smem_bytes);

// Beyond 48 KB shared memory has to be asked for.
template <class Kernel>
void allow_shared_memory(Kernel kernel, const char* name, int smem_bytes) {
    if (smem_bytes > 48 * 1024) {
        prepare_kernel(reinterpret_cast<const void*>(kernel), name, smem_bytes);
    }
}

// What a launch said; without `status`, call it right after one. Grids are one-dimensional
// everywhere: batch * heads * tiles in x, whose limit is 2^31 - 1 where y and z stop at 65535.
inline void check_launch(const char* name, int64_t grid, int threads, int smem_bytes,
                         cudaError_t status) {
    if (status != cudaSuccess) {
        cudaGetLastError();
        throw CudaError(std::string(name) + "<<<" + std::to_string(grid) + ", " +
                        std::to_string(threads) + ", " + std::to_string(smem_bytes) +
                        ">>>: " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
    }
}
inline void check_launch(const char* name, int64_t grid, int threads, int smem_bytes) {
    check_launch(name, grid, threads, smem_bytes, cudaGetLastError());
}

inline int count_sms(int device_index) {
    static thread_local int last_index = -1, last_count = 0;
    if (device_index != last_index) {
        int count = 0;
        check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_index),
                   "cudaDevAttrMultiProcessorCount");
        last_index = device_index, last_count = count;
    }
    return last_count;
}

// A launch; if `early`, of a kernel that waits by itself: it overlaps the end of what is before it
// on the stream.
template <class... Params>
void launch_dependent(bool early, void (*kernel)(Params...), const char* name, int64_t grid,
                      int threads, int smem_bytes, void* stream, const Params&... params) {
    const bool waits = prepare_kernel(reinterpret_cast<const void*>(kernel), name, smem_bytes);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = early && waits ? 1 : 0;
    check_launch(name, grid, threads, smem_bytes, cudaLaunchKernelEx(&config, kernel, params...));
}

}  // namespace fa101
