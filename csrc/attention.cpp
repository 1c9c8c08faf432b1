// The simple entry: check, plan, find workspace, run.
#include <fa101/attention.h>

#include "build_config.h"
#include "device_info_cuda.h"

#include <memory>

namespace fa101 {
namespace {

// 64-byte aligned, the size of a cache line.
struct HostDelete {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{64}); }
};

}  // namespace

void attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
               const TensorView* lse, const Options& options, Stream stream) {
    const Params params = make_params(q, k, v, o, lse, options);
    if (q.device.type == DeviceType::kCpu) {
        const Plan p = plan(params.problem, device_info(q.device), options.kernel, options.strategy);
        const std::unique_ptr<std::byte, HostDelete> workspace(
            p.workspace_bytes > 0 ? static_cast<std::byte*>(::operator new(
                                        static_cast<size_t>(p.workspace_bytes), std::align_val_t{64}))
                                  : nullptr);
        run(p, params.problem, params.tensors, workspace.get(), stream);
        return;
    }
    const DeviceInfo info = device_info(q.device);  // throws in a build without CUDA
    const Plan p = plan(params.problem, info, options.kernel, options.strategy);
#if FA101_HAS_CUDA
    const CudaDeviceGuard guard(q.device.index);
    if (p.workspace_bytes == 0 || params.problem.is_empty()) {
        run(p, params.problem, params.tensors, nullptr, stream);
        return;
    }
    const auto release = [stream](void* data) { cuda_release(data, stream); };
    const std::unique_ptr<void, decltype(release)> workspace(
        cuda_allocate(p.workspace_bytes, stream), release);
    run(p, params.problem, params.tensors, workspace.get(), stream);
#endif
}

}  // namespace fa101
