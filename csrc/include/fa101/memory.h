// Memory of a device, for callers that bring no allocator of their own: attention() for its
// workspace, the Python module for JAX, whose allocator cannot be reached from outside.
#pragma once

#include <fa101/export.h>
#include <fa101/plan.h>
#include <fa101/tensor_view.h>

#include <cstdint>

namespace fa101 {

// Uninitialised bytes, 256-byte aligned. On CUDA they are ordered with `stream`: there from what is
// enqueued after the constructor until what was enqueued before the destructor.
class FA101_EXPORT Buffer {
  public:
    Buffer(Device device, int64_t bytes, Stream stream = nullptr);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    void* data() const { return data_; }  // null when bytes is 0

  private:
    Device device_;
    Stream stream_;
    void* data_ = nullptr;
};

// Waits until the device has done all that was enqueued on it. Nothing else in the library waits.
FA101_EXPORT void synchronize(Device device);

}  // namespace fa101
