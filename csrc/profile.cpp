// profile-attention: every kernel of the ladder on one problem, checked and timed.
//
//     options -> device -> inputs and float64 reference -> for each kernel: check, time -> report
//
// Exit codes: 0 all is well, 1 a check failed or something broke, 2 the command line is wrong.
#include <fa101/plan.h>

#include "build_config.h"
#include "profile/backend.h"
#include "profile/measure.h"
#include "profile/options.h"
#include "profile/report.h"
#include "profile/support.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

namespace fa101::profile {
namespace {

int list_kernels() {
    const BuildInfo build = build_info();
    for (const KernelInfo& kernel : kernels()) {
        std::string where = "CPU";
        if (kernel.device == DeviceType::kCuda) {
            where = "not built";
            for (const BuildInfo::KernelArchs& built : build.archs) {
                if (built.kernel == kernel.name && !built.archs.empty()) where = "CUDA";
            }
        }
        std::printf("%-12s %-10s %s\n", kernel.name.c_str(), where.c_str(), kernel.lesson.c_str());
    }
    return 0;
}

// `notice` receives why it is the CPU when the user did not say.
std::unique_ptr<Backend> open_backend(const Arguments& args, std::string* notice) {
    const std::optional<Device>& wanted = args.device;
    if (wanted && wanted->type == DeviceType::kCpu) return open_cpu();
    std::string reason;
    const int count = cuda_device_count(&reason);
    if (wanted && wanted->index >= count) {
        throw BadArgument("--device", args.device_text,
                          count == 0 ? "cpu, as there is no usable GPU: " + reason
                                     : "cpu or below cuda:" + std::to_string(count));
    }
#if FA101_HAS_CUDA
    if (count > 0) {
        const Device device = wanted.value_or(Device{DeviceType::kCuda, 0});
        const DeviceInfo info = device_info(device);
        if (wanted || info.built_kernels != 0) return open_cuda(device.index);
        reason = "no kernel was built for sm_" + std::to_string(info.arch) + " of " + info.name;
    }
#endif
    *notice = "Profiling the CPU kernels, as there is no usable GPU: " + reason + "\n";
    return open_cpu();
}

void show_progress(const std::string& text) {
    static const bool on_terminal = isatty(STDERR_FILENO);
    if (on_terminal) std::fprintf(stderr, "\r\033[K%s", text.c_str());
}

bool is_wanted(const KernelInfo& kernel, const Arguments& args, DeviceType device) {
    if (args.kernels.empty()) return kernel.device == device;
    return std::find(args.kernels.begin(), args.kernels.end(), kernel.name) != args.kernels.end();
}

void profile_problem(Backend& backend, const Sizes& sizes, DType dtype, const Arguments& args,
                     Report& report) {
    std::unique_ptr<Workload> workload;
    std::string no_workload;
    try {
        show_progress(args.check ? "inputs and float64 reference" : "inputs");
        workload = std::make_unique<Workload>(backend, sizes, dtype, args);
    } catch (const OutOfMemory& error) {
        no_workload = error.what();
    } catch (const std::bad_alloc&) {
        no_workload = "out of memory on the host, for the inputs or the float64 reference";
    }
    show_progress("");
    report.begin(sizes, workload.get());

    const std::vector<KernelInfo> ladder = kernels();
    const auto naive =  // the first rung, which all are compared with
        std::find_if(ladder.begin(), ladder.end(),
                     [&](const KernelInfo& kernel) { return kernel.device == backend.id.type; });
    double naive_median = 0;
    for (auto kernel = ladder.begin(); kernel != ladder.end(); ++kernel) {
        const bool wanted = is_wanted(*kernel, args, backend.id.type);
        if (!wanted && kernel != naive) continue;
        Row row;
        row.kernel = kernel->name;
        row.reason = no_workload;
        if (workload != nullptr) {
            row = profile_kernel(backend, kernel->name, *workload, wanted && args.check, args,
                                 show_progress);
            show_progress("");
        }
        if (kernel == naive) naive_median = row.median;
        row.naive_median = naive_median;
        if (wanted) report.add(row);
    }
}

int profile(const Arguments& args) {
    std::string notice;
    const std::unique_ptr<Backend> backend = open_backend(args, &notice);
    require_writable_files(args);
    std::fputs(notice.c_str(), stdout);
    const bool on_gpu = backend->id.type == DeviceType::kCuda;
    const DType dtype = args.dtype.value_or(on_gpu ? DType::kFloat16 : DType::kFloat32);
    Report report(args, *backend, dtype);
    for (const Sizes& sizes : args.problems) profile_problem(*backend, sizes, dtype, args, report);
    report.write_files();
    return exit_code(report.rows());
}

int run_command(int argc, const char* const* argv) {
    const Arguments args = parse_arguments(argc, argv);
    if (!args.text.empty()) {
        std::fputs(args.text.c_str(), stdout);
        return 0;
    }
    if (args.support) {
        std::fputs(support_tables().c_str(), stdout);
        return 0;
    }
    return args.list ? list_kernels() : profile(args);
}

}  // namespace
}  // namespace fa101::profile

int main(int argc, char** argv) {
    try {
        return fa101::profile::run_command(argc, argv);
    } catch (const fa101::profile::BadArgument& error) {
        std::fprintf(stderr, "profile-attention: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "profile-attention: %s\n", error.what());
        return 1;
    }
}
