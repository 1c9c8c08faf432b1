// What the running machine is; the CUDA half is device_info_cuda.cpp.
#include <fa101/device_info.h>
#include <fa101/error.h>
#include <fa101/version.h>

#include "build_config.h"
#include "device_info_cuda.h"
#include "kernel_family.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <string_view>
#include <thread>

namespace fa101 {
namespace {

std::atomic<int> g_cpu_threads{0};

// A positive integer in an environment variable, else 0. OMP_NUM_THREADS may be a list ("4,2").
int positive_env(const char* name) {
    const char* text = std::getenv(name);
    const long value = text != nullptr ? std::strtol(text, nullptr, 10) : 0;
    return value > 0 && value < 4096 ? static_cast<int>(value) : 0;
}

std::string cpu_name() {
    std::ifstream cpuinfo("/proc/cpuinfo");
    for (std::string line; std::getline(cpuinfo, line);) {
        const size_t colon = line.find(": ");
        if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
            return line.substr(colon + 2);
        }
    }
    return "CPU";
}

SimdLevel best_simd_level() {
#if defined(__x86_64__) && defined(__GNUC__)
#if FA101_HAS_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        return SimdLevel::kAvx512;
    }
#endif
#if FA101_HAS_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        return SimdLevel::kAvx2;
    }
#endif
#endif
    return SimdLevel::kPortable;
}

DeviceInfo cpu_device_info() {
    DeviceInfo info;
    info.type = DeviceType::kCpu;
    static const std::string name = cpu_name();
    info.name = name;
    info.simd = cpu_simd_level();
    info.num_threads = cpu_threads();
    return info;
}

std::vector<std::string> split(std::string_view list) {
    std::vector<std::string> parts;
    while (!list.empty()) {
        const size_t end = std::min(list.find(';'), list.size());
        parts.emplace_back(list.substr(0, end));
        list.remove_prefix(std::min(end + 1, list.size()));
    }
    return parts;
}

}  // namespace

int cpu_threads() {
    if (const int n = g_cpu_threads.load(std::memory_order_relaxed); n > 0) return n;
    // Asked once: the system call behind hardware_concurrency costs more than a small problem.
    static const int n = [] {
        if (const int n = positive_env("FA101_NUM_THREADS"); n > 0) return n;
        if (const int n = positive_env("OMP_NUM_THREADS"); n > 0) return n;
        return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    }();
    return n;
}

void set_cpu_threads(int n) { g_cpu_threads.store(n, std::memory_order_relaxed); }

SimdLevel cpu_simd_level() {
    static const SimdLevel level = [] {
        const SimdLevel best = best_simd_level();
        const char* wanted = std::getenv("FA101_SIMD");
        if (wanted == nullptr) return best;
        for (SimdLevel l : {SimdLevel::kPortable, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
            if (std::string_view(wanted) == name_of(l) && l < best) return l;
        }
        return best;
    }();
    return level;
}

DeviceInfo device_info(Device device) {
    if (device.type == DeviceType::kCpu) return cpu_device_info();
#if FA101_HAS_CUDA
    return cuda_device_info(device.index);
#else
    throw CudaError("no usable GPU: this build has no CUDA code (FA101_CUDA=OFF or no nvcc)");
#endif
}

int cuda_device_count(std::string* reason) {
#if FA101_HAS_CUDA
    return cuda_count_devices(reason);
#else
    if (reason != nullptr) *reason = "this build has no CUDA code (FA101_CUDA=OFF or no nvcc)";
    return 0;
#endif
}

BuildInfo build_info() {
    BuildInfo info;
    info.version = FA101_VERSION;
    info.has_cuda = FA101_HAS_CUDA;
    info.cuda_version = FA101_CUDA_VERSION;
    info.cutlass_version = FA101_CUTLASS_VERSION;
    for (const KernelFamily* family : registry()) {
        if (family->archs == nullptr) continue;
        std::string name = family->name;
        if (family->strategy != Strategy::kSplitQ) {
            name += std::string(" ") + name_of(family->strategy);
        }
        info.archs.push_back({name, split(family->archs)});
    }
    info.simd.push_back(name_of(SimdLevel::kPortable));
    if (FA101_HAS_AVX2) info.simd.push_back(name_of(SimdLevel::kAvx2));
    if (FA101_HAS_AVX512) info.simd.push_back(name_of(SimdLevel::kAvx512));
    return info;
}

}  // namespace fa101
