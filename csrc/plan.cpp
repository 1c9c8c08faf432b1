// [3] One selector: plan(), supports() and run() all ask the same families.
#include <fa101/error.h>
#include <fa101/kv_cache.h>
#include <fa101/plan.h>

#include "build_config.h"
#include "common/mask.h"
#include "device_info_cuda.h"
#include "kernel_family.h"
#include "kv_cache.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

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
    if (problem.page_size > 0 && !family.reads_pages) return "it reads no pages (page_table)";
    if (problem.num_splits > 1 && family.splits == nullptr) {
        return "it does not split the keys (num_splits is " + std::to_string(problem.num_splits) +
               ")";
    }
    if (std::string reason = family.supports(problem, device); !reason.empty()) return reason;
    if (!is_built(family, device)) return describe_archs(family, device);
    return "";
}

// Who cannot serve ("" where that goes without saying), and why.
struct Refusal {
    std::string who, reason;
};

// "sm90, fa2_cute: it has no bias; fa2: ...": each reason once, after all whom it is of.
std::string join(const std::vector<Refusal>& refusals) {
    std::vector<Refusal> groups;
    for (const Refusal& refusal : refusals) {
        const auto same = std::find_if(groups.begin(), groups.end(), [&](const Refusal& group) {
            return group.reason == refusal.reason;
        });
        if (same == groups.end()) {
            groups.push_back(refusal);
        } else if (!same->who.empty()) {
            same->who += ", " + refusal.who;
        }
    }
    std::string text;
    for (const auto& [who, reason] : groups) {
        if (!text.empty()) text += "; ";
        text += who;
        if (!who.empty()) text += ": ";
        text += reason;
    }
    return text;
}

// A kernel and its strategy as the caller chooses them; "auto" leaves either open.
struct Choice {
    std::string_view kernel, strategy;

    bool allows(const KernelFamily& family) const {
        return (kernel == "auto" || kernel == family.name) &&
               (strategy == "auto" || strategy == name_of(family.strategy));
    }
};

// The families that serve: "'fa2', 'fa2_cute', 'fa2_cute' by split_kv".
std::string fitting_families(const Problem& problem, const DeviceInfo& device) {
    std::string text;
    for (const KernelFamily* family : registry()) {
        if (!refusal(*family, problem, device).empty()) continue;
        text += (text.empty() ? "" : ", ") + quoted(family->name);
        if (family->strategy != Strategy::kSplitQ) {
            text += std::string(" by ") + name_of(family->strategy);
        }
    }
    return text.empty() ? "none" : text;
}

void check_names(const Choice& choice, const Problem& problem, const DeviceInfo& device) {
    bool kernel_exists = choice.kernel == "auto", pair_exists = false;
    for (const KernelFamily* family : registry()) {
        kernel_exists |= choice.kernel == family->name;
        pair_exists |= choice.allows(*family);
    }
    const auto fitting = [&] { return "; these fit: " + fitting_families(problem, device); };
    if (!kernel_exists) {
        throw InvalidArgument("kernel " + quoted(choice.kernel) +
                              " is unknown; it must be 'auto' or one that fits this call" +
                              fitting());
    }
    bool strategy_exists = choice.strategy == "auto";
    for (Strategy known : {Strategy::kSplitQ, Strategy::kSplitKV, Strategy::kSplitD}) {
        strategy_exists |= choice.strategy == name_of(known);
    }
    if (!strategy_exists) {
        throw InvalidArgument("strategy " + quoted(choice.strategy) +
                              " is unknown; it must be 'auto', 'split_q', 'split_kv' or 'split_d'" +
                              fitting());
    }
    if (!pair_exists) {
        throw InvalidArgument("kernel " + quoted(choice.kernel) + " has no strategy " +
                              quoted(choice.strategy) + fitting());
    }
}

Plan make_plan(const KernelFamily& family, const Problem& problem, const DeviceInfo& device,
               std::string reason) {
    Plan plan;
    plan.kernel = family.name;
    plan.strategy = family.strategy;
    plan.tile = family.tile(problem, device);
    if (family.splits != nullptr) {
        const Splits splits = family.splits(problem, device);
        plan.num_splits = splits.count;
        plan.splits_per_wave = splits.per_wave;
        plan.splits_one_each = splits.one_each;
    }
    plan.workspace_bytes = problem.is_empty() ? 0 : family.workspace(plan, problem);
    plan.reason = std::move(reason);
    return plan;
}

int64_t query_tiles(const KernelFamily& family, const Problem& problem, const DeviceInfo& device) {
    const Tile tile = family.tile(problem, device);
    return problem.batch * problem.num_heads / tile.packed_heads *
           ceil_div<int64_t>(problem.seqlen_q * tile.packed_heads, tile.block_m);
}

// Few queries on CUDA cores: a tile of queries is one block's, which walks all keys alone and pads
// the tile's rows, while naive is parallel over keys too. Measured on an H200 against fa2 (float32,
// 1 to 512 heads, 1 to 1024 queries): naive wins up to 6 times below these bounds, fa2 above.
// Tensor cores have split_kv for that.
bool too_few_queries(const KernelFamily& split_q, const Problem& problem,
                     const DeviceInfo& device) {
    return 2 * query_tiles(split_q, problem, device) <= device.num_sms &&
           problem.batch * problem.num_heads * problem.seqlen_q <= 16 * device.num_sms;
}

// Whether the queries of a key/value head suit fa2_cute's tiles of split_kv, which read the keys
// once for a whole group: up to 16 rows. Up to 64 where sm90, which packs heads by powers of two,
// needs several tiles for them; a step of its 128 rows takes 1.75 of one of fa2_cute's 64 (H200).
bool suits_small_tiles(const KernelFamily& split_kv, const KernelFamily& small,
                       const Problem& problem, const DeviceInfo& device) {
    return problem.seqlen_q * problem.group_size() <= 16 ||
           (&split_kv != &small &&
            query_tiles(split_kv, problem, device) >= 2 * query_tiles(small, problem, device));
}

// Whether splitting the keys beats splitting the queries alone, where these do not suit the small
// tiles. All by measurements on an H200, head_dim 64 to 256.
bool prefers_split_kv(const KernelFamily& split_q, const KernelFamily& split_kv,
                      const Problem& problem, const DeviceInfo& device) {
    // sm90's splits are of its own tiles, so two are better than one; and lengths on the device
    // only they can read.
    if (&split_kv == find_kernel("sm90", Strategy::kSplitKV)) {
        return problem.has_seqlens_k || split_kv.splits(problem, device).count > 1;
    }
    // fa2_cute's tiles: many rows only if they leave most of the device idle.
    const int64_t rows = problem.seqlen_q * problem.group_size();
    if (rows > 64 && 3 * query_tiles(split_q, problem, device) > device.num_sms) return false;
    Problem typical = problem;  // the capacity of a cache must not choose the kernel
    if (problem.has_seqlens_k && problem.num_splits == 0) typical.seqlen_k = 8192;
    const int64_t keys = typical.seqlen_k, splits = split_kv.splits(typical, device).count;
    // Beside sm90 the keys of a part must be few: its blocks walk theirs 3.5 times as fast, and
    // have no parts to merge, which is worth 1024 keys.
    if (&split_q == find_kernel("sm90")) return 2 * keys > 2 * 1024 + 7 * ceil_div(keys, splits);
    // Else there are parts, or a block that is alone on its SM has many keys to read.
    return splits >= 2 || (query_tiles(split_kv, problem, device) <= device.num_sms && keys > 4096);
}

// Whether split_d leaves its highest rung for one that splits the keys too. sm90's has no such
// splits; of a full device it makes 2.2 to 2.6 times of fa2_cute's FLOP/s, but the multiprocessors
// that get no query tile idle. Over 512 a tile of it is two blocks, so a fifth is where it is even.
bool prefers_splits(const KernelFamily& split_d, const KernelFamily& splitting,
                    const Problem& problem, const DeviceInfo& device) {
    return split_d.splits == nullptr &&
           5 * query_tiles(split_d, problem, device) <= device.num_sms &&
           refusal(splitting, problem, device).empty() &&
           splitting.splits(problem, device).count > 1;
}

}  // namespace

bool is_built(std::string_view kernel, const DeviceInfo& device) {
    for (const KernelFamily* family : registry()) {
        if (kernel == family->name && device.type == family->device && is_built(*family, device)) {
            return true;
        }
    }
    return false;
}

std::string supports(std::string_view kernel, const Problem& problem, const DeviceInfo& device) {
    std::vector<Refusal> refusals;
    for (const KernelFamily* family : registry()) {
        if (kernel != family->name) continue;
        const std::string reason = refusal(*family, problem, device);
        if (reason.empty()) return "";
        refusals.push_back({"", reason});
    }
    return refusals.empty() ? "there is no kernel " + quoted(kernel) : join(refusals);
}

Plan plan(const Problem& problem, const DeviceInfo& device, std::string_view kernel,
          std::string_view strategy) {
    const Choice choice{kernel, strategy};
    check_names(choice, problem, device);

    // The highest rung that fits, of each strategy; and why those above it did not.
    const KernelFamily* best[3] = {};
    std::vector<Refusal> passed_over[3];
    std::string unbuilt;
    const Registry families = registry();
    for (int i = families.size() - 1; i >= 0; --i) {
        const KernelFamily& family = *families.begin()[i];
        if (!choice.allows(family)) continue;
        if (kernel == "auto" && family.device != problem.device) continue;
        const int index = static_cast<int>(family.strategy);
        if (best[index] != nullptr) continue;
        const std::string reason = refusal(family, problem, device);
        if (reason.empty()) {
            best[index] = &family;
            continue;
        }
        std::string who = kernel == "auto" ? family.name : "";
        if (strategy == "auto" && family.strategy != Strategy::kSplitQ) {
            who += std::string(who.empty() ? "" : " by ") + name_of(family.strategy);
        }
        passed_over[index].push_back({who, reason});
        if (!is_built(family, device) && reason == describe_archs(family, device)) unbuilt = reason;
    }
    const KernelFamily* const split_q = best[static_cast<int>(Strategy::kSplitQ)];
    const KernelFamily* split_kv = best[static_cast<int>(Strategy::kSplitKV)];
    const KernelFamily& small = *find_kernel("fa2_cute", Strategy::kSplitKV);
    const bool is_small = split_kv != nullptr && choice.allows(small) &&
                          refusal(small, problem, device).empty() &&
                          suits_small_tiles(*split_kv, small, problem, device);
    if (is_small) split_kv = &small;
    const KernelFamily* const split_d = best[static_cast<int>(Strategy::kSplitD)];

    if (split_q == nullptr && split_kv == nullptr && split_d == nullptr) {
        std::vector<Refusal> refusals;
        for (const std::vector<Refusal>& of_strategy : passed_over) {
            refusals.insert(refusals.end(), of_strategy.begin(), of_strategy.end());
        }
        std::string reasons = join(refusals);
        if (kernel == "auto" && strategy == "auto") {
            if (!unbuilt.empty()) throw CudaError(unbuilt);
            throw Unsupported("no kernel answers this call: " + reasons);
        }
        const std::string what =
            strategy == "auto" ? "kernel " + quoted(kernel)
            : kernel == "auto" ? "strategy " + quoted(strategy)
                               : "kernel " + quoted(kernel) + " with strategy " + quoted(strategy);
        if (reasons.empty()) reasons = "no kernel for this device has it";
        throw InvalidArgument(what + " does not fit: " + reasons +
                              "; these fit: " + fitting_families(problem, device));
    }
    const auto chosen = [&](const KernelFamily& family, const char* why) {
        const std::vector<Refusal>& above = passed_over[static_cast<int>(family.strategy)];
        const bool tell = kernel == "auto" && !above.empty();
        return make_plan(family, problem, device, why + (tell ? " (" + join(above) + ")" : ""));
    };
    if (split_d != nullptr) {
        const KernelFamily& splitting = *find_kernel("fa2_cute", Strategy::kSplitD);
        if (kernel == "auto" && prefers_splits(*split_d, splitting, problem, device)) {
            return chosen(splitting, "too few query tiles to fill the device: keys are split too");
        }
        return chosen(*split_d, "head_dim is split over warps");
    }
    if (split_q == nullptr) {
        const bool is_forced = kernel != "auto" || strategy != "auto";
        return chosen(*split_kv, is_forced  ? "asked for by name"
                                 : is_small ? "the queries of a key/value head fit one small tile"
                                            : "the only one that fits");
    }
    if (split_kv != nullptr &&
        (is_small || prefers_split_kv(*split_q, *split_kv, problem, device))) {
        const char* why = "too few query tiles to fill the device: keys are split too";
        if (split_kv->splits(problem, device).count == 1) {
            why = is_small                ? "the queries of a key/value head fit one small tile"
                  : problem.has_seqlens_k ? "the highest rung that reads seqlens_k"
                                          : "few query tiles, which it walks through keys faster";
        }
        return chosen(*split_kv, why);
    }
    if (kernel != "auto") return chosen(*split_q, "asked for by name");
    const KernelFamily* const naive = find_kernel("naive");
    if (split_q == find_kernel("fa2") && too_few_queries(*split_q, problem, device) &&
        refusal(*naive, problem, device).empty()) {
        return chosen(*naive, "parallel over keys too: there are too few queries to fill the GPU");
    }
    return chosen(*split_q, "the highest rung of the ladder that fits");
}

namespace {

// Whether the launch of the attention writes the new keys, too.
bool appends(const KernelFamily* family, const AppendParams& new_keys, const Plan& plan,
             const Problem& problem, const Tensors& tensors) {
    return family != nullptr && family->can_append != nullptr && !problem.is_empty() &&
           num_rows(new_keys) > 0 && family->can_append(new_keys, plan, problem, tensors);
}

// new_keys: to be appended before, or null.
void run(const AppendParams* new_keys, const Plan& plan, const Problem& problem,
         const Tensors& tensors, void* workspace, Stream stream) {
    const KernelFamily* family = find_kernel(plan.kernel, plan.strategy);
    if (family == nullptr) {
        throw InvalidArgument("plan.kernel is " + quoted(plan.kernel) + " with strategy " +
                              quoted(name_of(plan.strategy)) +
                              ", which is no kernel of this library");
    }
    if (problem.is_empty()) {
        if (new_keys != nullptr) append(*new_keys, stream);
        return;
    }
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
    if (new_keys != nullptr) {
        if (appends(family, *new_keys, plan, problem, tensors)) {
            return family->append_and_launch(*new_keys, plan, problem, tensors, workspace, stream);
        }
        append(*new_keys, stream);
    }
    family->launch(plan, problem, tensors, workspace, stream);
}

}  // namespace

void run(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
         Stream stream) {
    run(nullptr, plan, problem, tensors, workspace, stream);
}

void append_and_run(const AppendParams& params, const Plan& plan, const Problem& problem,
                    const Tensors& tensors, void* workspace, Stream stream) {
    run(&params, plan, problem, tensors, workspace, stream);
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const KernelFamily* family : registry()) {
        if (list.empty() || list.back().name != family->name) {
            list.push_back({family->name, family->device, family->lesson, {}});
        }
        list.back().strategies.push_back(family->strategy);
    }
    return list;
}

namespace {

// `append`: how new keys are written, or "".
std::string explain(const Plan& plan, const Problem& problem, const DeviceInfo& device,
                    const std::string& append) {
    std::ostringstream text;
    text << "problem    batch " << problem.batch << ", heads " << problem.num_heads << " ("
         << problem.num_heads_kv << " for k and v), seqlen " << problem.seqlen_q << " x "
         << problem.seqlen_k << ", head_dim " << problem.head_dim;
    if (problem.head_dim_v != problem.head_dim) text << " (v: " << problem.head_dim_v << ")";
    text << ", " << name_of(problem.dtype_q);
    if (problem.dtype_kv != problem.dtype_q)
        text << " (" << name_of(problem.dtype_kv) << " k and v)";
    text << ", scale " << problem.softmax_scale;
    const auto from_i = [](int64_t bound) {
        return bound == 0  ? std::string("i")
               : bound > 0 ? "i + " + std::to_string(bound)
                           : "i - " + std::to_string(-bound);
    };
    if (problem.has_left_bound() || problem.has_right_bound()) {
        text << ", query i sees ";
        if (problem.has_left_bound()) text << from_i(problem.mask_left) << " <= ";
        text << "key";
        if (problem.has_right_bound()) text << " <= " << from_i(problem.mask_right);
    }
    if (problem.softcap > 0) text << ", softcap " << problem.softcap;
    if (problem.has_bias) text << ", " << name_of(problem.dtype_bias) << " bias";
    if (problem.has_mask) text << ", mask";
    if (problem.has_seqlens_k) text << ", seqlens_k";
    if (problem.page_size > 0) text << ", pages of " << problem.page_size;
    text << "\ndevice     " << device.name << "\nkernel     " << plan.kernel << "\nstrategy   "
         << name_of(plan.strategy) << "\ntile       " << plan.tile.block_m;
    if (plan.tile.packed_heads > 1) {
        text << " rows (queries of " << plan.tile.packed_heads << " heads) x ";
    } else {
        text << " queries x ";
    }
    text << plan.tile.block_n << " keys, head_dim padded to " << plan.tile.head_dim << ", "
         << plan.tile.num_warps << (problem.device == DeviceType::kCpu ? " threads" : " warps")
         << ", " << plan.tile.stages << " stage(s)\nsplits     " << plan.num_splits
         << "\nworkspace  " << plan.workspace_bytes << " bytes";
    if (!append.empty()) text << "\nappend     " << append;
    text << "\nwhy        " << plan.reason << "\n";
    return text.str();
}

}  // namespace

std::string explain(const Plan& plan, const Problem& problem, const DeviceInfo& device) {
    return explain(plan, problem, device, "");
}

std::string explain(const AppendParams& params, const Plan& plan, const Problem& problem,
                    const Tensors& tensors, const DeviceInfo& device) {
    const KernelFamily* family = find_kernel(plan.kernel, plan.strategy);
    const bool in_one = appends(family, params, plan, problem, tensors);
    return explain(plan, problem, device,
                   num_rows(params) == 0                 ? ""
                   : in_one                              ? "in the attention's own launch"
                   : problem.device == DeviceType::kCuda ? "a launch of its own, before"
                                                         : "before the attention");
}

}  // namespace fa101
