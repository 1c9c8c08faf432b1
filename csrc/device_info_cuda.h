// The CUDA half of device_info.h; only compiled where there is a CUDA toolkit.
#pragma once

#include <fa101/device_info.h>

#include <cstdint>
#include <string>

namespace fa101 {

int cuda_count_devices(std::string* reason);
DeviceInfo cuda_device_info(int index);

// Stream-ordered memory for fa101::attention(): the only place the library allocates on a GPU.
void* cuda_allocate(int64_t bytes, void* stream);
void cuda_release(void* data, void* stream);

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
