#include "device_info_cuda.h"

#include "common/launch.h"
#include "kernel_family.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace fa101 {
namespace {

int attribute(cudaDeviceAttr attr, int index) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, attr, index), "cudaDeviceGetAttribute");
    return value;
}

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

DeviceInfo query(int index) {
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    DeviceInfo info;
    info.type = DeviceType::kCuda;
    info.name = properties.name;
    info.arch = 10 * properties.major + properties.minor;
    info.num_sms = properties.multiProcessorCount;
    info.smem_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
    info.l2_bytes = properties.l2CacheSize;
    info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    // Rates moved from cudaDeviceProp to attributes in CUDA 13; kHz, and double data rate.
    info.clock_hz = 1e3 * attribute(cudaDevAttrClockRate, index);
    info.memory_bandwidth = 2e3 * attribute(cudaDevAttrMemoryClockRate, index) *
                            attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8;
    info.built_kernels = 0;
    int bit = 0;
    for (const KernelFamily* family : registry()) {
        if (family->archs != nullptr && archs_serve(family->archs, info.arch)) {
            info.built_kernels |= 1u << bit;
        }
        ++bit;
    }
    return info;
}

}  // namespace

int cuda_count_devices(std::string* reason) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count > 0) return count;
    if (reason != nullptr) {
        int driver = 0;
        if (status == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess) {
            *reason = driver == 0 ? "no CUDA driver is installed"
                                  : "the driver supports CUDA " + version_text(driver) +
                                        " but this build needs " + version_text(CUDART_VERSION);
        } else {
            *reason =
                status == cudaSuccess ? "no CUDA device is visible" : cudaGetErrorString(status);
        }
    }
    cudaGetLastError();
    return 0;
}

DeviceInfo cuda_device_info(int index) {
    static std::mutex mutex;
    static std::map<int, DeviceInfo> cache;
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = cache.find(index); found != cache.end()) return found->second;
    std::string reason;
    const int count = cuda_count_devices(&reason);
    if (count == 0) throw CudaError("no usable GPU: " + reason);
    if (index < 0 || index >= count) {
        throw CudaError("device cuda:" + std::to_string(index) + " does not exist; there are " +
                        std::to_string(count));
    }
    return cache[index] = query(index);
}

bool prepare_kernel(const void* kernel, const char* name, int smem_bytes) {
    struct Prepared {
        const void* kernel = nullptr;
        int device = 0, smem_bytes = 0;
        bool waits = false;
    };
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    // The last kernels of each thread, so that a launch need not look further.
    static thread_local std::array<Prepared, 64> recent;
    Prepared& here = recent[reinterpret_cast<uintptr_t>(kernel) / 16 % recent.size()];
    if (here.kernel == kernel && here.device == device && here.smem_bytes >= smem_bytes) {
        return here.waits;
    }

    // Of all threads: the limit is the kernel's on the device, and must not be lowered again.
    static std::mutex mutex;
    static std::map<std::pair<int, const void*>, Prepared> prepared;
    const std::string what =
        std::string(name) + " (" + std::to_string(smem_bytes) + " bytes of shared memory)";
    const std::lock_guard<std::mutex> lock(mutex);
    const auto [found, is_new] = prepared.try_emplace({device, kernel});
    if (is_new) {
        cudaFuncAttributes attributes;
        const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
        if (status != cudaSuccess) prepared.erase(found);
        check_cuda(status, what.c_str());
        found->second = {kernel, device, 48 * 1024, attributes.ptxVersion >= 90};
    }
    if (smem_bytes > found->second.smem_bytes) {
        check_cuda(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
            what.c_str());
        found->second.smem_bytes = smem_bytes;
    }
    here = found->second;
    return here.waits;
}

void* cuda_allocate(int index, int64_t bytes, void* stream) {
    const CudaDeviceGuard guard(index);
    void* data = nullptr;
    check_cuda(
        cudaMallocAsync(&data, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)),
        (std::to_string(bytes) + " bytes on cuda:" + std::to_string(index)).c_str());
    return data;
}

void cuda_release(int index, void* data, void* stream) noexcept {
    // Errors have nowhere to go: this runs in destructors, also while the process exits.
    int current = index;
    cudaGetDevice(&current);
    cudaSetDevice(index);
    cudaFreeAsync(data, static_cast<cudaStream_t>(stream));
    cudaSetDevice(current);
}

void cuda_synchronize(int index) {
    const CudaDeviceGuard guard(index);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

CudaDeviceGuard::CudaDeviceGuard(int index) {
    int current = 0;
    check_cuda(cudaGetDevice(&current), "cudaGetDevice");
    // Also when it is current: this binds the device's context to the thread, which calls into the
    // driver (tensor maps) need and a thread's first runtime call does not always do.
    check_cuda(cudaSetDevice(index), "cudaSetDevice");
    if (current != index) previous_ = current;
}

CudaDeviceGuard::~CudaDeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace fa101
