// The profiler's CUDA half and the float64 reference on the GPU.
#include "profile/backend.h"
#include "profile/measure.h"
#include "profile/options.h"
#include "testing/host_tensor.h"
#include "testing/reference.h"

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace {

using namespace fa101::profile;
using fa101::DType;
using fa101::testing::HostTensor;

}  // namespace

TEST_CASE("the GPU's float64 reference is the CPU's") {
    const std::unique_ptr<Backend> gpu = open_cuda(0);
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        for (bool causal : {false, true}) {
            for (int64_t row_step : {1, 3}) {
                for (int64_t seqlen_k : {0, 1, 300}) {
                    HostTensor q(dtype, {2, 4, 70, 40}), k(dtype, {2, 2, seqlen_k, 40});
                    HostTensor v(dtype, {2, 2, seqlen_k, 24}), o(dtype, {2, 4, 70, 24});
                    q.fill_normal(1), k.fill_normal(2), v.fill_normal(3);
                    fa101::Options options;
                    options.causal = causal;
                    options.align = fa101::Align::kBottomRight;
                    fa101::Params params = fa101::make_params(q.view(), k.view(), v.view(),
                                                              o.view(), nullptr, options);
                    const auto rows =
                        static_cast<size_t>(8 * fa101::testing::num_rows(params.problem, row_step));
                    std::vector<double> expected(rows * 24);
                    fa101::testing::reference_attention(params.problem, params.tensors,
                                                        expected.data(), nullptr, 2, row_step);

                    Buffer buffers[3];
                    const HostTensor* tensors[] = {&q, &k, &v};
                    const void** pointers[] = {&params.tensors.q_ptr, &params.tensors.k_ptr,
                                               &params.tensors.v_ptr};
                    for (int i = 0; i < 3; ++i) {
                        const int64_t bytes = tensors[i]->numel() * fa101::size_of(dtype);
                        buffers[i] = gpu->allocate(bytes, "a tensor");
                        if (bytes > 0) gpu->upload(buffers[i].get(), tensors[i]->data(), bytes);
                        *pointers[i] = buffers[i].get();
                    }
                    const std::vector<double> actual =
                        gpu->reference(params.problem, params.tensors, row_step);
                    REQUIRE(actual.size() == expected.size());
                    double max_error = 0;
                    for (size_t i = 0; i < actual.size(); ++i) {
                        max_error = std::max(max_error, std::fabs(actual[i] - expected[i]));
                        if (std::isnan(actual[i])) max_error = INFINITY;
                    }
                    CHECK(max_error < 1e-13);
                }
            }
        }
    }
}

TEST_CASE("the GPU as the profiler sees it") {
    const std::unique_ptr<Backend> gpu = open_cuda(0);
    CHECK(gpu->info.num_sms > 0);
    CHECK(gpu->peak(DType::kFloat32).flops > 1e12);
    CHECK(gpu->time([](fa101::Stream) {}) < 1e-3);
    CHECK_THROWS_AS(gpu->allocate(int64_t{1} << 50, "everything"), OutOfMemory);
}

TEST_CASE("every kernel that answers the default problem passes") {
    const std::unique_ptr<Backend> gpu = open_cuda(0);
    const char* options[] = {"profile-attention", "--iters", "3", "--causal"};
    const Arguments args = parse_arguments(4, options);
    Workload workload(*gpu, args.problems[0], DType::kFloat16, args);
    CHECK(workload.row_step == 1);
    for (const fa101::KernelInfo& kernel : fa101::kernels()) {
        if (kernel.device != fa101::DeviceType::kCuda) continue;
        CAPTURE(kernel.name);
        const Row row =
            profile_kernel(*gpu, kernel.name, workload, true, args, [](const std::string&) {});
        CAPTURE(row.reason);
        CHECK((row.status == Status::kPassed || row.status == Status::kNotRun));
        CHECK(row.peak_share < 1);
    }
}
