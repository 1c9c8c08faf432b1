#include "common/launch.h"
#include "profile/backend.h"
#include "testing/reference.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>

namespace fa101::profile {
namespace {

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string describe_hz(double hz) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.2f GHz", hz / 1e9);
    return text;
}

// FLOP per clock of one SM: CUDA cores (a multiply-add each) in fp32, and tensor cores in dense
// fp16 with fp32 accumulation. GeForce cards have half of the latter. From NVIDIA's architecture
// whitepapers; times SMs and clock they give the data sheets' figures (T4 65, A100 312, A40 150,
// H100 989 at 1.83 GHz, B200 2250, RTX 4090 165, RTX 5090 209 TFLOP/s).
struct SmRate {
    int arch;
    int cuda_cores;
    int tensor_flop;
    bool bf16;
};
constexpr SmRate kSmRates[] = {
    {75, 64, 1024, false},  {80, 64, 2048, true},   {86, 128, 1024, true},  {87, 128, 2048, true},
    {89, 128, 1024, true},  {90, 128, 4096, true},  {100, 128, 8192, true}, {103, 128, 8192, true},
    {120, 128, 1024, true}, {121, 128, 1024, true},
};

class CudaBackend final : public Backend {
  public:
    explicit CudaBackend(int index) {
        id = Device{DeviceType::kCuda, index};
        info = device_info(id);
        check_cuda(cudaSetDevice(index), "cudaSetDevice");
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        check_cuda(cudaEventCreate(&start_), "cudaEventCreate");
        check_cuda(cudaEventCreate(&stop_), "cudaEventCreate");
        // Long enough to write, too, that the host has queued the run before the device gets to it.
        flush_bytes_ = std::max<int64_t>(2 * info.l2_bytes, int64_t{256} << 20);
        check_cuda(cudaMalloc(&flush_, static_cast<size_t>(flush_bytes_)), "cudaMalloc");

        int driver = 0, runtime = 0, memory_khz = 0;
        check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
        check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
        check_cuda(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, index),
                   "cudaDeviceGetAttribute");
        versions = {{"cuda_driver", version_text(driver)}, {"cuda_runtime", version_text(runtime)}};
        summary = "cuda:" + std::to_string(index) + ": " + info.name + ", sm_" +
                  std::to_string(info.arch) + ", " + std::to_string(info.num_sms) + " SMs at " +
                  describe_hz(info.clock_hz) + ", " +
                  describe_bytes(static_cast<double>(info.memory_bytes)) + " of memory at " +
                  describe_bytes(info.memory_bandwidth) + "/s (" + describe_hz(1e3 * memory_khz) +
                  "), CUDA " + version_text(runtime) + ", driver for " + version_text(driver);
    }

    ~CudaBackend() override {
        cudaFree(flush_);
        cudaEventDestroy(stop_);
        cudaEventDestroy(start_);
        cudaStreamDestroy(stream_);
    }

    Peak peak(DType dtype) const override {
        for (const SmRate& rate : kSmRates) {
            if (rate.arch != info.arch) continue;
            const bool geforce = info.name.find("GeForce") != std::string::npos;
            const bool tensor =
                dtype == DType::kFloat16 || (dtype == DType::kBFloat16 && rate.bf16);
            const int flop = tensor ? rate.tensor_flop / (geforce ? 2 : 1) : 2 * rate.cuda_cores;
            return {flop * info.num_sms * info.clock_hz,
                    std::string(tensor ? "tensor cores, dense" : "CUDA cores, float32") + ": " +
                        std::to_string(flop) + " FLOP a clock x " + std::to_string(info.num_sms) +
                        " SMs x " + describe_hz(info.clock_hz)};
        }
        return {0, "no figure for sm_" + std::to_string(info.arch)};
    }

    void upload(void* to, const void* from, int64_t bytes) override {
        copy(to, from, bytes, cudaMemcpyHostToDevice);
    }
    void download(void* to, const void* from, int64_t bytes) override {
        copy(to, from, bytes, cudaMemcpyDeviceToHost);
    }
    void fill(void* data, int byte, int64_t bytes) override {
        check_cuda(cudaMemsetAsync(data, byte, static_cast<size_t>(bytes), stream_), "cudaMemset");
        synchronize("cudaMemset");
    }

    std::vector<double> reference(const Problem& problem, const Tensors& tensors,
                                  int64_t row_step) override {
        const int64_t n = problem.batch * problem.num_heads * testing::num_rows(problem, row_step) *
                          problem.head_dim_v;
        const int64_t bytes = n * static_cast<int64_t>(sizeof(double));
        const Buffer device_o = allocate(bytes, "the float64 reference");
        testing::reference_attention_gpu(problem, tensors, static_cast<double*>(device_o.get()),
                                         nullptr, stream_, row_step);
        std::vector<double> o(static_cast<size_t>(n));
        download(o.data(), device_o.get(), bytes);
        return o;
    }
    // Data centre parts do float64 at half the rate of float32, the others at 1/32 or 1/64.
    double reference_budget() const override {
        return info.arch == 80 || info.arch == 90 || info.arch == 100 ? 1e12 : 5e10;
    }

    double time(const std::function<void(Stream)>& launch) override {
        check_cuda(
            cudaMemsetAsync(flush_, ++flush_value_, static_cast<size_t>(flush_bytes_), stream_),
            "cudaMemset");
        check_cuda(cudaEventRecord(start_, stream_), "cudaEventRecord");
        launch(stream_);
        check_cuda(cudaEventRecord(stop_, stream_), "cudaEventRecord");
        synchronize("kernel");
        float milliseconds = 0;
        check_cuda(cudaEventElapsedTime(&milliseconds, start_, stop_), "cudaEventElapsedTime");
        return 1e-3 * milliseconds;
    }
    std::string flush_note() const override {
        return describe_bytes(static_cast<double>(flush_bytes_)) +
               " (at least twice the L2 cache of " +
               describe_bytes(static_cast<double>(info.l2_bytes)) + ") written before each run";
    }

  protected:
    double free_bytes() const override {
        size_t free = 0, total = 0;
        check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
        return static_cast<double>(free);
    }
    void* allocate_raw(int64_t bytes) override {
        void* data = nullptr;
        const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes));
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError();  // clear it: the next call must not see this error
            return nullptr;
        }
        check_cuda(status, "cudaMalloc");
        return data;
    }
    void release_raw(void* data) override { cudaFree(data); }

  private:
    void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
        check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_),
                   "cudaMemcpy");
        synchronize("cudaMemcpy");
    }
    void synchronize(const char* what) { check_cuda(cudaStreamSynchronize(stream_), what); }

    cudaStream_t stream_ = nullptr;
    cudaEvent_t start_ = nullptr, stop_ = nullptr;
    void* flush_ = nullptr;
    int64_t flush_bytes_ = 0;
    unsigned char flush_value_ = 0;
};

}  // namespace

std::unique_ptr<Backend> open_cuda(int index) { return std::make_unique<CudaBackend>(index); }

}  // namespace fa101::profile
