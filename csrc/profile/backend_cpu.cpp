#include "profile/backend.h"
#include "testing/parallel.h"
#include "testing/reference.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <numeric>
#include <set>
#include <sstream>
#include <thread>

namespace fa101::profile {
namespace {

constexpr std::align_val_t kAlignment{64};

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The number after `key` and the colon that may follow, in the first line of `file` that starts
// with `key`; `missing` where there is none.
double read_proc(const char* file, const std::string& key, double missing) {
    std::ifstream lines(file);
    for (std::string line; std::getline(lines, line);) {
        if (line.rfind(key, 0) != 0) continue;
        const size_t colon = line.find(':');
        std::istringstream text(line.substr(colon == std::string::npos ? key.size() : colon + 1));
        double value = missing;
        return text >> value ? value : missing;
    }
    return missing;
}

// Memory that can still be used without swapping, here and in the cgroup we may be confined to.
double available_bytes() {
    double bytes = 1024 * read_proc("/proc/meminfo", "MemAvailable",
                                    static_cast<double>(std::numeric_limits<int64_t>::max()));
    const double limit = read_proc("/sys/fs/cgroup/memory.max", "", -1);
    const double used = read_proc("/sys/fs/cgroup/memory.current", "", -1);
    if (limit >= 0 && used >= 0) bytes = std::min(bytes, std::max(0.0, limit - used));
    return bytes;
}

// The last-level caches of all cores together, as the kernel describes them (CPUID of a virtual
// machine may tell of the host's).
int64_t last_level_cache_bytes() {
    const auto read = [](int cpu, int index, const char* what) {
        std::string text;
        std::ifstream("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" +
                      std::to_string(index) + "/" + what) >>
            text;
        return text;
    };
    int last = 0;
    while (!read(0, last + 1, "size").empty()) ++last;
    int64_t bytes = 0;
    std::set<std::string> seen;  // the cores that share a cache name it
    for (int cpu = 0;; ++cpu) {
        const std::string size = read(cpu, last, "size");  // "32768K"
        if (size.empty()) break;
        if (!seen.insert(read(cpu, last, "shared_cpu_list")).second) continue;
        bytes += std::strtoll(size.c_str(), nullptr, 10) << (size.back() == 'M' ? 20 : 10);
    }
    return bytes > 0 ? bytes : int64_t{32} << 20;
}

// FLOP of `n` rounds of multiply-adds in independent chains: enough of them to hide the latency
// (4 cycles times 2 units) in registers alone.
thread_local volatile float g_number;  // hides the values from the compiler

template <int kLanes, int kChains>
__attribute__((always_inline)) inline double multiply_adds(int64_t n) {
    typedef float Vector __attribute__((vector_size(4 * kLanes)));
    Vector x[kChains];
    for (int c = 0; c < kChains; ++c) x[c] = Vector{} + (g_number + static_cast<float>(c));
    for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 16
        for (int c = 0; c < kChains; ++c) x[c] = x[c] * 0.999f + 0.001f;
    }
    for (int c = 1; c < kChains; ++c) x[0] += x[c];
    g_number = x[0][0];
    return 2.0 * kLanes * kChains * static_cast<double>(n);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) double multiply_adds_avx512(int64_t n) {
    return multiply_adds<16, 16>(n);
}
__attribute__((target("avx2,fma"))) double multiply_adds_avx2(int64_t n) {
    return multiply_adds<8, 12>(n);
}
#endif

double multiply_adds_at(SimdLevel level, int64_t n) {
#if defined(__x86_64__)
    if (level == SimdLevel::kAvx512) return multiply_adds_avx512(n);
    if (level == SimdLevel::kAvx2) return multiply_adds_avx2(n);
#endif
    return multiply_adds<4, 8>(n);
}

double thread_cpu_seconds() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// How many units of which width a core has, and at which clock it runs them, is not to be had from
// its name; so the peak is measured, on all threads at once. CPU time, not wall time: what else
// runs on the machine makes a kernel slow, but the peak no lower.
double measure_peak_flops(SimdLevel level, int num_threads) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    std::vector<double> rates(static_cast<size_t>(std::min(num_threads, std::max(cores, 1))));
    testing::parallel_for(static_cast<int64_t>(rates.size()), num_threads, [&](int64_t t) {
        double& best = rates[static_cast<size_t>(t)];
        for (int repeat = 0; repeat < 5; ++repeat) {
            const double start = thread_cpu_seconds();
            const double flop = multiply_adds_at(level, 1000000);
            best = std::max(best, flop / (thread_cpu_seconds() - start));
        }
    });
    return std::accumulate(rates.begin(), rates.end(), 0.0);
}

class CpuBackend final : public Backend {
  public:
    CpuBackend() {
        id = Device{DeviceType::kCpu, 0};
        info = device_info(id);
        cache_bytes_ = last_level_cache_bytes();
        flush_.resize(static_cast<size_t>(std::min<int64_t>(2 * cache_bytes_, 1 << 30)));
        peak_flops_ = measure_peak_flops(info.simd, info.num_threads);

        const double mhz = read_proc("/proc/cpuinfo", "cpu MHz", 0);
        char clock[32] = "clock unknown";
        if (mhz > 0) std::snprintf(clock, sizeof(clock), "%.2f GHz", mhz / 1000);
        const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                              static_cast<double>(sysconf(_SC_PAGE_SIZE));
        summary = "cpu: " + info.name + ", " + std::to_string(info.num_threads) +
                  " threads, SIMD " + name_of(info.simd) + ", " + clock + ", " +
                  describe_bytes(memory) + " of memory";
    }

    Peak peak(DType) const override {
        return {peak_flops_,
                std::string("multiply-adds measured on all threads, SIMD ") + name_of(info.simd)};
    }

    void upload(void* to, const void* from, int64_t bytes) override {
        std::memcpy(to, from, static_cast<size_t>(bytes));
    }
    void download(void* to, const void* from, int64_t bytes) override { upload(to, from, bytes); }
    void fill(void* data, int byte, int64_t bytes) override {
        std::memset(data, byte, static_cast<size_t>(bytes));
    }

    std::vector<double> reference(const Problem& problem, const Tensors& tensors,
                                  int64_t row_step) override {
        const int64_t n = problem.batch * problem.num_heads * testing::num_rows(problem, row_step) *
                          problem.head_dim_v;
        require_free(8.0 * static_cast<double>(n), "the float64 reference");
        std::vector<double> o(static_cast<size_t>(n));
        testing::reference_attention(problem, tensors, o.data(), nullptr, info.num_threads,
                                     row_step);
        return o;
    }
    double reference_budget() const override { return 3e9 * info.num_threads; }

    double time(const std::function<void(Stream)>& launch) override {
        // Every thread writes its share, so that private caches lose what they held too.
        const int64_t share = static_cast<int64_t>(flush_.size()) / info.num_threads;
        testing::parallel_for(info.num_threads, info.num_threads, [&](int64_t t) {
            std::memset(flush_.data() + t * share, ++flush_value_, static_cast<size_t>(share));
        });
        const auto start = std::chrono::steady_clock::now();
        launch(nullptr);
        return seconds_since(start);
    }
    std::string flush_note() const override {
        return describe_bytes(static_cast<double>(flush_.size())) +
               " written by all threads before each run (last-level caches: " +
               describe_bytes(static_cast<double>(cache_bytes_)) + ")";
    }

  protected:
    double free_bytes() const override { return available_bytes(); }
    void* allocate_raw(int64_t bytes) override {
        void* data = ::operator new(static_cast<size_t>(bytes), kAlignment, std::nothrow);
        if (data != nullptr) std::memset(data, 0, static_cast<size_t>(bytes));  // make it real
        return data;
    }
    void release_raw(void* data) override { ::operator delete(data, kAlignment); }

  private:
    int64_t cache_bytes_ = 0;
    std::vector<unsigned char> flush_;
    std::atomic<unsigned char> flush_value_{0};
    double peak_flops_ = 0;
};

}  // namespace

std::unique_ptr<Backend> open_cpu() { return std::make_unique<CpuBackend>(); }

}  // namespace fa101::profile
