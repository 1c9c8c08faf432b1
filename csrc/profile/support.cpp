#include "profile/support.h"

#include <fa101/error.h>
#include <fa101/plan.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace fa101::profile {
namespace {

constexpr int64_t kMaxHeadDim = 1100;  // past every kernel's limit but the CPU's, which have none

struct Example {
    const char* name;
    int arch, num_sms, smem_kb;
};
constexpr Example kGpus[] = {
    {"T4 (sm_75)", 75, 40, 64},           {"A100 (sm_80)", 80, 108, 163},
    {"RTX 3090 (sm_86)", 86, 82, 99},     {"RTX 4090 (sm_89)", 89, 128, 99},
    {"H100, H200 (sm_90)", 90, 132, 227}, {"B200 (sm_100)", 100, 148, 227}};

DeviceInfo gpu(const Example& example) {
    DeviceInfo info;
    info.type = DeviceType::kCuda;
    info.name = example.name;
    info.arch = example.arch;
    info.num_sms = example.num_sms;
    info.smem_per_block = int64_t{1024} * example.smem_kb;
    return info;
}

Problem usual(DeviceType device, DType dtype, int64_t head_dim) {
    Problem p;
    p.batch = 2, p.num_heads = p.num_heads_kv = 8;
    p.seqlen_q = p.seqlen_k = 1024;
    p.head_dim = p.head_dim_v = head_dim;
    p.device = device;
    p.dtype_q = p.dtype_kv = p.dtype_o = p.dtype_bias = dtype;
    p.softmax_scale = 0.125f;
    const int64_t vector = 16 / size_of(dtype);
    p.aligned16 = p.tma = head_dim % vector == 0;
    return p;
}

bool answers(const KernelInfo& kernel, Strategy strategy, const Problem& problem,
             const DeviceInfo& device) {
    try {
        plan(problem, device, kernel.name, name_of(strategy));
        return true;
    } catch (const Error&) {
        return false;
    }
}

// "1-256", "8-256 by 8", "-" for none.
std::string describe(const std::vector<int64_t>& head_dims) {
    if (head_dims.empty()) return "-";
    const int64_t first = head_dims.front(), last = head_dims.back();
    const auto steps = static_cast<int64_t>(head_dims.size()) - 1;
    std::string text = std::to_string(first);
    if (last == kMaxHeadDim) return text + " and up";
    if (steps == 0) return text;
    const int64_t step = (last - first) / steps;
    return text + "-" + std::to_string(last) + (step > 1 ? " by " + std::to_string(step) : "");
}

std::vector<int64_t> head_dims(const KernelInfo& kernel, Strategy strategy, DType dtype,
                               const DeviceInfo& device) {
    std::vector<int64_t> dims;
    for (int64_t dim = 1; dim <= kMaxHeadDim; ++dim) {
        if (answers(kernel, strategy, usual(kernel.device, dtype, dim), device)) {
            dims.push_back(dim);
        }
    }
    return dims;
}

// float32, then float16 and bfloat16 if they differ.
std::string describe_dtypes(const KernelInfo& kernel, Strategy strategy, const DeviceInfo& device) {
    const auto of = [&](DType dtype) {
        return describe(head_dims(kernel, strategy, dtype, device));
    };
    const std::string fp32 = of(DType::kFloat32), fp16 = of(DType::kFloat16);
    const std::string bf16 = of(DType::kBFloat16);
    if (fp32 == fp16 && fp16 == bf16) return fp32 == "-" ? fp32 : "all: " + fp32;
    std::string text;
    const auto add = [&](const char* dtype, const std::string& dims) {
        if (dims != "-") text += std::string(text.empty() ? "" : "; ") + dtype + ": " + dims;
    };
    add("fp32", fp32);
    if (fp16 == bf16) {
        add("fp16, bf16", fp16);
    } else {
        add("fp16", fp16);
        add("bf16", bf16);
    }
    return text;
}

template <class Row>
void for_each_row(const Row& row) {
    for (const KernelInfo& kernel : kernels()) {
        for (Strategy strategy : kernel.strategies) row(kernel, strategy);
    }
}

// Where the kernel is most at home.
DeviceInfo home(const KernelInfo& kernel) {
    DeviceInfo cpu;
    cpu.name = "CPU";
    return kernel.device == DeviceType::kCpu ? cpu : gpu(kGpus[4]);
}

void head_dim_table(std::ostringstream& text) {
    text << "| kernel | strategy | CPU |";
    for (const Example& example : kGpus) text << " " << example.name << " |";
    text << "\n| --- | --- | --- |";
    for (size_t i = 0; i < std::size(kGpus); ++i) text << " --- |";
    text << "\n";
    for_each_row([&](const KernelInfo& kernel, Strategy strategy) {
        const bool on_cpu = kernel.device == DeviceType::kCpu;
        text << "| `" << kernel.name << "` | " << name_of(strategy) << " | "
             << (on_cpu ? describe_dtypes(kernel, strategy, home(kernel)) : "-") << " |";
        for (const Example& example : kGpus) {
            text << " " << (on_cpu ? "-" : describe_dtypes(kernel, strategy, gpu(example))) << " |";
        }
        text << "\n";
    });
}

void feature_table(std::ostringstream& text) {
    struct Feature {
        const char* name;
        void (*ask)(Problem&);
    };
    const Feature features[] = {
        {"causal", [](Problem& p) { p.mask_right = 0; }},
        {"window", [](Problem& p) { p.mask_left = -100, p.mask_right = 0; }},
        {"softcap", [](Problem& p) { p.softcap = 30; }},
        {"bias", [](Problem& p) { p.has_bias = true; }},
        {"mask", [](Problem& p) { p.has_mask = true; }},
        {"seqlens_k", [](Problem& p) { p.has_seqlens_k = true; }},
        {"pages", [](Problem& p) { p.page_size = 16, p.has_seqlens_k = true; }},
        {"fp8 keys", [](Problem& p) { p.dtype_kv = DType::kFloat8E4M3; }},
        {"head_dim_v differs", [](Problem& p) { p.head_dim_v -= 8; }},
        {"grouped heads", [](Problem& p) { p.num_heads_kv = 2; }},
        {"unaligned rows", [](Problem& p) { p.aligned16 = p.tma = false; }},
        {"stride 0", [](Problem& p) { p.tma = false; }},
    };
    text << "| kernel | strategy |";
    for (const Feature& feature : features) text << " " << feature.name << " |";
    text << "\n| --- | --- |";
    for (size_t i = 0; i < std::size(features); ++i) text << " --- |";
    text << "\n";
    for_each_row([&](const KernelInfo& kernel, Strategy strategy) {
        const DeviceInfo device = home(kernel);
        const int64_t head_dim = strategy == Strategy::kSplitD ? 512 : 128;
        text << "| `" << kernel.name << "` | " << name_of(strategy) << " |";
        for (const Feature& feature : features) {
            Problem p = usual(kernel.device, DType::kFloat16, head_dim);
            feature.ask(p);
            text << " " << (answers(kernel, strategy, p, device) ? "yes" : "-") << " |";
        }
        text << "\n";
    });
}

}  // namespace

std::string support_tables() {
    std::ostringstream text;
    text << "Head dimensions, of queries and values:\n\n";
    head_dim_table(text);
    text << "\nFeatures (float16, head_dim 128, or 512 for split_d):\n\n";
    feature_table(text);
    return text.str();
}

}  // namespace fa101::profile
