// What the planner needs to know about a device, as plain data: the plan for a T4, an A100 or a
// laptop can be asked for, and is unit-tested, on a machine that has none of them.
#pragma once

#include <fa101/export.h>
#include <fa101/tensor_view.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fa101 {

enum class SimdLevel : uint8_t { kPortable, kAvx2, kAvx512 };

constexpr const char* name_of(SimdLevel level) {
    return level == SimdLevel::kAvx512 ? "avx512" : level == SimdLevel::kAvx2 ? "avx2" : "portable";
}

struct DeviceInfo {
    DeviceType type = DeviceType::kCpu;
    std::string name;

    // Bit i is set when the i-th registered kernel has code in this binary that the device can run.
    // All ones by default, so a hand-written DeviceInfo stands for a full build.
    uint32_t built_kernels = ~0u;

    // CUDA
    int arch = 0;  // 10 * major + minor, e.g. 90
    int num_sms = 0;
    int64_t smem_per_block = 0;  // bytes a block may opt in to
    int64_t l2_bytes = 0;
    int64_t memory_bytes = 0;
    double memory_bandwidth = 0;  // bytes / s, theoretical; 0 when unknown
    double clock_hz = 0;          // SM clock, highest

    // CPU
    SimdLevel simd = SimdLevel::kPortable;
    int num_threads = 1;
};

// The device as the running machine reports it; cached per device. Throws CudaError
// ("no usable GPU: reason") when there is none.
FA101_EXPORT DeviceInfo device_info(Device device);

// CUDA devices that can be used; 0 without a GPU, a driver or CUDA code in the build. Never throws;
// `reason` receives why when it is 0.
FA101_EXPORT int cuda_device_count(std::string* reason = nullptr);

// Threads the CPU kernels use: set_cpu_threads(n) when n > 0, else FA101_NUM_THREADS, else
// OMP_NUM_THREADS, else the cores this process may run on.
FA101_EXPORT int cpu_threads();
FA101_EXPORT void set_cpu_threads(int n);

// The SIMD level the CPU kernels run at: the best of what was built and what the CPU has;
// FA101_SIMD=portable|avx2|avx512 lowers it.
FA101_EXPORT SimdLevel cpu_simd_level();

// How this binary was built.
struct BuildInfo {
    std::string version;
    bool has_cuda = false;
    std::string cuda_version;     // of the toolkit, "" without CUDA
    std::string cutlass_version;  // "" without CUTLASS
    struct KernelArchs {
        std::string kernel;
        std::vector<std::string> archs;  // "75", "80", "90", "90a"; "compute_90" for PTX
    };
    std::vector<KernelArchs> archs;  // CUDA kernels only
    std::vector<std::string> simd;   // levels compiled in
};
FA101_EXPORT BuildInfo build_info();

}  // namespace fa101
