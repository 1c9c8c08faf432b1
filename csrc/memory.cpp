// Memory for callers without an allocator; the CUDA half is device_info_cuda.cpp.
#include <fa101/memory.h>

#include "build_config.h"
#include "device_info_cuda.h"

#include <new>

namespace fa101 {
namespace {

constexpr std::align_val_t kAlignment{256};

}  // namespace

Buffer::Buffer(Device device, int64_t bytes, Stream stream) : device_(device), stream_(stream) {
    if (bytes == 0) return;
    if (device.type == DeviceType::kCpu) {
        data_ = ::operator new(static_cast<size_t>(bytes), kAlignment);
        return;
    }
    device_info(device);  // throws where there is no such device
#if FA101_HAS_CUDA
    data_ = cuda_allocate(device.index, bytes, stream);
#endif
}

Buffer::~Buffer() {
    if (data_ == nullptr) return;
    if (device_.type == DeviceType::kCpu) {
        ::operator delete(data_, kAlignment);
        return;
    }
#if FA101_HAS_CUDA
    cuda_release(device_.index, data_, stream_);
#endif
}

void synchronize(Device device) {
    if (device.type == DeviceType::kCpu) return;
    device_info(device);
#if FA101_HAS_CUDA
    cuda_synchronize(device.index);
#endif
}

}  // namespace fa101
