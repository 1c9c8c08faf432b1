// [3] The list of kernels, in the order of the ladder. The planner, --list, explain(), the support
// table and the tests all read it.
#include "build_config.h"
#include "cpu/cpu_families.h"
#include "flash_attn/family.h"
#include "flash_attn_1.h"
#include "flash_attn_2.h"
#include "flash_attn_sm90/family.h"
#include "flash_attn_sm90_split_d/family.h"
#include "flash_attn_split_d/family.h"
#include "flash_decode/family.h"
#include "kernel_family.h"
#include "naive_attention.h"

#include <cstdlib>
#include <cstring>
#include <iterator>

// A kernel's launcher where this build has code for it.
#if FA101_HAS_CUDA
#define FA101_CUDA_LAUNCH(launcher) launcher
#else
#define FA101_CUDA_LAUNCH(launcher) nullptr
#endif

namespace fa101 {
namespace {

constexpr KernelFamily kNaive = {
    "naive",
    Strategy::kSplitQ,
    DeviceType::kCuda,
    "three passes, the S x S matrix in memory: count the bytes",
    naive::supports,
    naive::tile,
    /*splits=*/nullptr,
    naive::workspace,
    FA101_CUDA_LAUNCH(naive::launch),
    FA101_CUDA_CORE_ARCHS,
};

constexpr KernelFamily kFa1 = {
    "fa1",
    Strategy::kSplitQ,
    DeviceType::kCuda,
    "tiles and the online softmax, keys outside: O(N) memory, but O travels",
    fa1::supports,
    fa1::tile,
    /*splits=*/nullptr,
    fa1::workspace,
    FA101_CUDA_LAUNCH(fa1::launch),
    FA101_CUDA_CORE_ARCHS,
};

constexpr KernelFamily kFa2 = {
    "fa2",
    Strategy::kSplitQ,
    DeviceType::kCuda,
    "loops swapped: query tiles in parallel, one normalisation, register tiles",
    fa2::supports,
    fa2::tile,
    /*splits=*/nullptr,
    fa2::workspace,
    FA101_CUDA_LAUNCH(fa2::launch),
    FA101_CUDA_CORE_ARCHS,
};

constexpr KernelFamily kFa2Cute = {
    "fa2_cute",
    Strategy::kSplitQ,
    DeviceType::kCuda,
    "the same loop on tensor cores with CuTe: layouts, ldmatrix, cp.async, swizzles",
    fa2_cute::supports,
    fa2_cute::tile,
    /*splits=*/nullptr,
    fa2_cute::workspace,
    FA101_CUDA_LAUNCH(fa2_cute::launch),
    FA101_CUTE_AND_SM75_ARCHS,
};

constexpr KernelFamily kFa2CuteSplitKV = {
    "fa2_cute",
    Strategy::kSplitKV,
    DeviceType::kCuda,
    "few queries: keys split over blocks, partial results merged exactly",
    flash_decode::supports,
    flash_decode::tile,
    flash_decode::splits,
    flash_decode::workspace,
    FA101_CUDA_LAUNCH(flash_decode::launch),
    FA101_DECODE_ARCHS,
    /*reads_pages=*/true,
    flash_decode::can_append,
    FA101_CUDA_LAUNCH(flash_decode::append_and_launch),
};

constexpr KernelFamily kFa2CuteSplitD = {
    "fa2_cute",
    Strategy::kSplitD,
    DeviceType::kCuda,
    "head_dim over 256: O's columns and Q K^T's sum split over warps",
    split_d::supports,
    split_d::tile,
    split_d::splits,
    split_d::workspace,
    FA101_CUDA_LAUNCH(split_d::launch),
    FA101_DECODE_ARCHS,  // its parts are merged by combine.cu
};

constexpr KernelFamily kSm90 = {
    "sm90",
    Strategy::kSplitQ,
    DeviceType::kCuda,
    "Hopper: TMA moves, wgmma multiplies, warpgroups with one job each",
    sm90::supports,
    sm90::tile,
    /*splits=*/nullptr,
    sm90::workspace,
    FA101_CUDA_LAUNCH(sm90::launch),
    FA101_SM90_ARCHS,
};

constexpr KernelFamily kSm90SplitKV = {
    "sm90",
    Strategy::kSplitKV,
    DeviceType::kCuda,
    "Hopper, a chunk of queries and a long cache: keys split over blocks, parts merged",
    sm90::supports_splits,
    sm90::tile_of_splits,
    sm90::splits,
    sm90::workspace_of_splits,
    FA101_CUDA_LAUNCH(sm90::launch_splits),
    FA101_SM90_ARCHS,
};

constexpr KernelFamily kSm90SplitD = {
    "sm90",
    Strategy::kSplitD,
    DeviceType::kCuda,
    "Hopper, head_dim over 256: O's columns split over warpgroups",
    sm90_split_d::supports,
    sm90_split_d::tile,
    /*splits=*/nullptr,
    sm90_split_d::workspace,
    FA101_CUDA_LAUNCH(sm90_split_d::launch),
    FA101_SM90_ARCHS,
};

constexpr const KernelFamily* kFamilies[] = {
    &kNaive, &kFa1,         &kFa2,        &kFa2Cute,        &kFa2CuteSplitKV, &kFa2CuteSplitD,
    &kSm90,  &kSm90SplitKV, &kSm90SplitD, &kCpuNaiveFamily, &kCpuFa1Family,   &kCpuFa2Family,
};

}  // namespace

Registry registry() { return {kFamilies, static_cast<int>(std::size(kFamilies))}; }

const KernelFamily* find_kernel(std::string_view name, Strategy strategy) {
    for (const KernelFamily* family : registry()) {
        if (name == family->name && strategy == family->strategy) return family;
    }
    return nullptr;
}

std::string refuse_extras(const Problem& p) {
    const char* extra = p.has_left_bound() ? "window"
                        : p.softcap > 0    ? "softcap"
                        : p.has_bias       ? "bias"
                        : p.has_mask       ? "mask"
                        : p.has_seqlens_k  ? "seqlens_k"
                                           : nullptr;
    return extra != nullptr ? std::string("it has no ") + extra : "";
}

bool archs_serve(const char* archs, int arch) {
    // Machine code runs on its own major version from its minor version on ("80-real" on an 86);
    // architecture-specific code ("90a-real") on exactly its own; PTX on everything later.
    for (const char* entry = archs; *entry != '\0';) {
        char* suffix = nullptr;
        const int built = static_cast<int>(std::strtol(entry, &suffix, 10));
        const bool exact = *suffix == 'a';
        if (exact) ++suffix;
        const bool is_ptx = std::strncmp(suffix, "-virtual", 8) == 0;
        if (exact                     ? built == arch
            : is_ptx                  ? built <= arch
            : built / 10 == arch / 10 ? built <= arch
                                      : false) {
            return true;
        }
        entry = std::strchr(suffix, ';');
        if (entry == nullptr) break;
        ++entry;
    }
    return false;
}

}  // namespace fa101
