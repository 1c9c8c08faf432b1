// What every kernel family gives. Plain C++, compiled in every build, so that plans for any GPU can
// be made and tested without nvcc; only `launch` needs it. Adding a kernel is its own folder and
// one line in registry.cpp.
#pragma once

#include <fa101/device_info.h>
#include <fa101/kv_cache.h>
#include <fa101/params.h>
#include <fa101/plan.h>

#include <cstdint>
#include <string>

namespace fa101 {

// Parts that the keys of a tile of rows are split into: at most, as many as fill the device, and as
// many of these as give no multiprocessor a second block.
struct Splits {
    int count = 1, per_wave = 1, one_each = 1;
};

struct KernelFamily {
    const char* name;
    Strategy strategy;  // a kernel with several has a family for each
    DeviceType device;
    const char* lesson;  // one line, for --list

    // "" when the family answers the problem on the device, else the reason it does not.
    std::string (*supports)(const Problem&, const DeviceInfo&);

    // Changes speed, never results. Called only when supports() says "".
    Tile (*tile)(const Problem&, const DeviceInfo&);

    // Null: the keys are not split. Never a function of seqlens_k or of what other batch entries
    // hold, so that a sequence gets the same bits in any company.
    Splits (*splits)(const Problem&, const DeviceInfo&);

    // Bytes of workspace the launch needs, for a plan with all of the above.
    int64_t (*workspace)(const Plan&, const Problem&);

    // Enqueues the kernel; the problem is never empty (Problem::is_empty). Null in a build that
    // has no code for it.
    void (*launch)(const Plan&, const Problem&, const Tensors&, void* workspace, Stream stream);

    // The compiled architectures, ';'-separated as FA101_ARCHS spells them; null for CPU kernels.
    const char* archs;

    bool reads_pages = false;  // K and V through a page table

    // Whether the launch can do append() (kv_cache.h) of these rows, too; and that launch. Null:
    // never.
    bool (*can_append)(const AppendParams&, const Plan&, const Problem&, const Tensors&) = nullptr;
    void (*append_and_launch)(const AppendParams&, const Plan&, const Problem&, const Tensors&,
                              void* workspace, Stream stream) = nullptr;
};

// All families, in the order of the ladder.
struct Registry {
    const KernelFamily* const* begin_;
    int size_;
    const KernelFamily* const* begin() const { return begin_; }
    const KernelFamily* const* end() const { return begin_ + size_; }
    int size() const { return size_; }
};
Registry registry();

// The family of that name and strategy, or null.
const KernelFamily* find_kernel(std::string_view name, Strategy strategy = Strategy::kSplitQ);

// "" or the first of window, softcap, bias, mask and seqlens_k that is asked for: the reason of a
// family that has none of them.
std::string refuse_extras(const Problem& problem);

// True when code compiled for `archs` ("75-real;90-virtual;90a-real") runs on a device of `arch`.
bool archs_serve(const char* archs, int arch);

}  // namespace fa101
