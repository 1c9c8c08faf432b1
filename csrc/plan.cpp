// [3] One selector: plan(), supports() and run() all ask the same families.
#include <fa101/error.h>
#include <fa101/plan.h>

#include "build_config.h"
#include "common/mask.h"
#include "device_info_cuda.h"
#include "kernel_family.h"

#include <optional>
#include <sstream>

namespace fa101 {
namespace {

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

bool is_built(const KernelFamily& family, const DeviceInfo& device) {
    int index = 0;
    for (const KernelFamily* other : registry()) {
        if (other == &family) break;
        ++index;
    }
    return (device.built_kernels >> index) & 1u;
}

std::string describe_archs(const KernelFamily& family, const DeviceInfo& device) {
    return "this build has no code for the GPU's architecture sm_" + std::to_string(device.arch) +
           " (" + family.name +
           " was built for: " + (*family.archs ? family.archs : "no CUDA architecture") + ")";
}

// "" or why `family` cannot serve: the wrong device, no code for it, or the family's own reason.
std::string refusal(const KernelFamily& family, const Problem& problem, const DeviceInfo& device) {
    if (family.device != problem.device) {
        return std::string("it runs on ") + (family.device == DeviceType::kCpu ? "CPU" : "CUDA") +
               " tensors";
    }
    if (std::string reason = family.supports(problem, device); !reason.empty()) return reason;
    if (!is_built(family, device)) return describe_archs(family, device);
    return "";
}

std::string fitting_kernels(const Problem& problem, const DeviceInfo& device) {
    std::string names;
    for (const KernelFamily* family : registry()) {
        if (refusal(*family, problem, device).empty()) {
            names += (names.empty() ? "" : ", ") + quoted(family->name);
        }
    }
    return names.empty() ? "none" : names;
}

void check_strategy(std::string_view strategy) {
    if (strategy == "auto" || strategy == name_of(Strategy::kSplitQ)) return;
    if (strategy == "split_kv" || strategy == "split_d") {
        throw InvalidArgument("strategy " + quoted(strategy) +
                              " has no kernel in this version; 'auto' and 'split_q' do");
    }
    throw InvalidArgument("strategy " + quoted(strategy) +
                          " is unknown; it must be 'auto' or 'split_q'");
}

Plan make_plan(const KernelFamily& family, const Problem& problem, const DeviceInfo& device,
               std::string reason) {
    Plan plan;
    plan.kernel = family.name;
    plan.tile = family.tile(problem, device);
    plan.workspace_bytes = problem.is_empty() ? 0 : family.workspace(plan.tile, problem);
    plan.reason = std::move(reason);
    return plan;
}

// On CUDA cores, few queries: fa2 gives each tile of queries to one block, which walks all keys
// alone and pads the tile's rows, while naive is parallel over keys too. Measured on an H200
// (float32, 1 to 512 heads, 1 to 1024 queries): naive wins up to 6 times below these bounds, fa2
// above.
bool too_few_queries(const KernelFamily& fa2, const Problem& problem, const DeviceInfo& device) {
    const int64_t heads = problem.batch * problem.num_heads;
    const int64_t tiles =
        heads * ceil_div<int64_t>(problem.seqlen_q, fa2.tile(problem, device).block_m);
    return 2 * tiles <= device.num_sms && heads * problem.seqlen_q <= 16 * device.num_sms;
}

}  // namespace

std::string supports(std::string_view kernel, const Problem& problem, const DeviceInfo& device) {
    const KernelFamily* family = find_kernel(kernel);
    if (family == nullptr) return "there is no kernel " + quoted(kernel);
    return refusal(*family, problem, device);
}

Plan plan(const Problem& problem, const DeviceInfo& device, std::string_view kernel,
          std::string_view strategy) {
    check_strategy(strategy);
    if (kernel != "auto") {
        const KernelFamily* family = find_kernel(kernel);
        if (family == nullptr) {
            throw InvalidArgument("kernel " + quoted(kernel) +
                                  " is unknown; it must be 'auto' or one that fits this call: " +
                                  fitting_kernels(problem, device));
        }
        const std::string reason = refusal(*family, problem, device);
        if (!reason.empty()) {
            throw InvalidArgument("kernel " + quoted(kernel) + " does not fit: " + reason +
                                  "; these fit: " + fitting_kernels(problem, device));
        }
        return make_plan(*family, problem, device, "asked for by name");
    }

    // auto: each rung beats the one below, so the highest that fits wins.
    const KernelFamily* best = nullptr;
    std::string passed_over, unbuilt;
    const Registry families = registry();
    for (int i = families.size() - 1; i >= 0 && best == nullptr; --i) {
        const KernelFamily& family = *families.begin()[i];
        if (family.device != problem.device) continue;
        const std::string reason = refusal(family, problem, device);
        if (reason.empty()) {
            best = &family;
        } else {
            passed_over +=
                std::string(passed_over.empty() ? "" : "; ") + family.name + ": " + reason;
            if (family.supports(problem, device).empty()) unbuilt = reason;
        }
    }
    if (best == nullptr) {
        if (!unbuilt.empty()) throw CudaError(unbuilt);
        throw Unsupported("no kernel answers this call: " + passed_over);
    }
    const KernelFamily* const naive = find_kernel("naive");
    if (best == find_kernel("fa2") && too_few_queries(*best, problem, device) &&
        refusal(*naive, problem, device).empty()) {
        return make_plan(*naive, problem, device,
                         "parallel over keys too: there are too few queries to fill the GPU" +
                             (passed_over.empty() ? "" : " (" + passed_over + ")"));
    }
    return make_plan(*best, problem, device,
                     "the highest rung of the ladder that fits" +
                         (passed_over.empty() ? "" : " (" + passed_over + ")"));
}

void run(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
         Stream stream) {
    const KernelFamily* family = find_kernel(plan.kernel);
    if (family == nullptr) {
        throw InvalidArgument("plan.kernel is " + quoted(plan.kernel) +
                              ", which is no kernel of this library");
    }
    if (problem.is_empty()) return;
    if (family->launch == nullptr) {
        throw CudaError(std::string("this build has no CUDA code, so kernel ") +
                        quoted(family->name) + " cannot run; build with FA101_CUDA=ON");
    }
    if (plan.workspace_bytes > 0 && workspace == nullptr) {
        throw InvalidArgument("workspace is null but the plan needs " +
                              std::to_string(plan.workspace_bytes) + " bytes");
    }
#if FA101_HAS_CUDA
    std::optional<CudaDeviceGuard> guard;
    if (problem.device == DeviceType::kCuda) guard.emplace(tensors.device_index);
#endif
    family->launch(plan, problem, tensors, workspace, stream);
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const KernelFamily* family : registry()) {
        list.push_back({family->name, family->device, family->lesson});
    }
    return list;
}

std::string explain(const Plan& plan, const Problem& problem, const DeviceInfo& device) {
    std::ostringstream text;
    text << "problem    batch " << problem.batch << ", heads " << problem.num_heads << " ("
         << problem.num_heads_kv << " for k and v), seqlen " << problem.seqlen_q << " x "
         << problem.seqlen_k << ", head_dim " << problem.head_dim;
    if (problem.head_dim_v != problem.head_dim) text << " (v: " << problem.head_dim_v << ")";
    text << ", " << name_of(problem.dtype_q) << ", scale " << problem.softmax_scale;
    if (problem.is_masked()) text << ", query i sees keys <= i + " << problem.mask_right;
    text << "\ndevice     " << device.name << "\nkernel     " << plan.kernel << "\nstrategy   "
         << name_of(plan.strategy) << "\ntile       " << plan.tile.block_m << " queries x "
         << plan.tile.block_n << " keys, head_dim padded to " << plan.tile.head_dim << ", "
         << plan.tile.num_warps << (problem.device == DeviceType::kCpu ? " threads" : " warps")
         << ", " << plan.tile.stages << " stage(s)\nsplits     " << plan.num_splits
         << "\nworkspace  " << plan.workspace_bytes << " bytes\nwhy        " << plan.reason << "\n";
    return text.str();
}

}  // namespace fa101
