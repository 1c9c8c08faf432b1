// What profiling needs from a device, once for the CPU and once for CUDA: memory, the float64
// reference, and the time of one cold run.
#pragma once

#include <fa101/device_info.h>
#include <fa101/params.h>
#include <fa101/plan.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fa101::profile {

struct OutOfMemory : std::runtime_error {
    OutOfMemory(const std::string& what, double bytes, double free_bytes);
};

// "1.5 GB"
std::string describe_bytes(double bytes);

using Buffer = std::unique_ptr<void, std::function<void(void*)>>;

class Backend {
  public:
    virtual ~Backend() = default;

    Device id;
    DeviceInfo info;
    std::string summary;                                        // one line for people
    std::vector<std::pair<std::string, std::string>> versions;  // driver and runtime, for JSON

    // The most a kernel on this dtype could do, in FLOP/s, 0 when unknown; and where that is from.
    struct Peak {
        double flops = 0;
        std::string source;
    };
    virtual Peak peak(DType dtype) const = 0;

    // Throws OutOfMemory, before asking for it, when `bytes` are more than what is free. The memory
    // is there, not only promised, and at least 64-byte aligned.
    Buffer allocate(int64_t bytes, const std::string& what);
    // Throws OutOfMemory when the device has not that much left.
    void require_free(double bytes, const std::string& what) const;

    virtual void upload(void* to, const void* from, int64_t bytes) = 0;
    virtual void download(void* to, const void* from, int64_t bytes) = 0;
    virtual void fill(void* data, int byte, int64_t bytes) = 0;

    // The float64 reference of device tensors, on the host: (batch, num_heads, num_rows,
    // head_dim_v)
    virtual std::vector<double> reference(const Problem& problem, const Tensors& tensors,
                                          int64_t row_step) = 0;
    // How many FLOP of reference are worth waiting for: about a second's.
    virtual double reference_budget() const = 0;

    // Seconds that `launch` takes on the device when no cache holds anything of use. What was
    // flushed, and how, is said by flush_note().
    virtual double time(const std::function<void(Stream)>& launch) = 0;
    virtual std::string flush_note() const = 0;

  protected:
    virtual double free_bytes() const = 0;
    virtual void* allocate_raw(int64_t bytes) = 0;  // null when there is not enough
    virtual void release_raw(void* data) = 0;
};

std::unique_ptr<Backend> open_cpu();
std::unique_ptr<Backend> open_cuda(int index);  // only in a build with CUDA

}  // namespace fa101::profile
