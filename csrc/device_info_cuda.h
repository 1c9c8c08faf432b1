// The CUDA half of device_info.h; only compiled where there is a CUDA toolkit.
#pragma once

#include <fa101/device_info.h>

#include <cstdint>
#include <string>

namespace fa101 {

int cuda_count_devices(std::string* reason);
DeviceInfo cuda_device_info(int index);

// For Buffer and synchronize() of memory.h: the only places where the library allocates on a GPU
// or waits for one.
void* cuda_allocate(int index, int64_t bytes, void* stream);
void cuda_release(int index, void* data, void* stream) noexcept;
void cuda_synchronize(int index);

// Makes `index` the current device until the guard goes out of scope.
class CudaDeviceGuard {
  public:
    explicit CudaDeviceGuard(int index);
    ~CudaDeviceGuard();
    CudaDeviceGuard(const CudaDeviceGuard&) = delete;
    CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

  private:
    int previous_ = -1;
};

}  // namespace fa101
