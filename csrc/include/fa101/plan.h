// Stage [3] of the flow: which kernel answers a Problem on a device, and how it will run.
#pragma once

#include <fa101/device_info.h>
#include <fa101/export.h>
#include <fa101/params.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fa101 {

// What is split over blocks: tiles of queries; the keys too, where there are too few queries; or
// the head dimension, where a row of it is too long for one warp's registers.
enum class Strategy : uint8_t { kSplitQ, kSplitKV, kSplitD };

constexpr const char* name_of(Strategy strategy) {
    return strategy == Strategy::kSplitQ    ? "split_q"
           : strategy == Strategy::kSplitKV ? "split_kv"
                                            : "split_d";
}

struct Tile {
    int block_m = 0;   // query rows a block owns (the papers' Br), of all packed heads
    int block_n = 0;   // keys of one step (Bc)
    int head_dim = 0;  // head_dim the tile is compiled for; smaller ones are padded with zeros
    int num_warps = 0;
    int stages = 1;        // K/V tiles in flight
    int packed_heads = 1;  // that share a key/value head, and whose queries are rows of one tile
};

struct Plan {
    const char* kernel = "";  // a name from kernels()
    Strategy strategy = Strategy::kSplitQ;
    Tile tile;
    int num_splits = 1;           // parts that a tile's keys are split into, at most
    int splits_per_wave = 1;      // so many fill the device; where they lie follows from it
    int splits_one_each = 1;      // of these, so many may have half as many keys
    int64_t workspace_bytes = 0;  // the caller provides this much, 256-byte aligned, on the device
    std::string reason;           // one sentence: why this kernel
};

// Picks a kernel. Pure: no CUDA call, the same answer for the same question. Throws
// InvalidArgument for an unknown or unfit `kernel` or `strategy` (naming those that fit), and
// Unsupported when no kernel fits.
FA101_EXPORT Plan plan(const Problem& problem, const DeviceInfo& device,
                       std::string_view kernel = "auto", std::string_view strategy = "auto");

// An opaque cudaStream_t; null is CUDA's default stream. Ignored on the CPU.
using Stream = void*;

// Enqueues the work on `stream` of the tensors' device (CUDA), leaving the current device as it
// was, or does it (CPU). Never allocates device memory, never synchronises; can be captured in a
// CUDA graph.
FA101_EXPORT void run(const Plan& plan, const Problem& problem, const Tensors& tensors,
                      void* workspace, Stream stream);

// Several lines for people: the problem, the kernel, the tile, the workspace and why.
FA101_EXPORT std::string explain(const Plan& plan, const Problem& problem,
                                 const DeviceInfo& device);

// Every kernel of the library, in the order of the ladder.
struct KernelInfo {
    std::string name;
    DeviceType device;
    std::string lesson;                // one line
    std::vector<Strategy> strategies;  // that it has
};
FA101_EXPORT std::vector<KernelInfo> kernels();

// True when this build has code of the kernel, for one of its strategies, that the device can run.
FA101_EXPORT bool is_built(std::string_view kernel, const DeviceInfo& device);

// "" when the kernel answers the problem on the device by one of its strategies, else the reason
// it does not.
FA101_EXPORT std::string supports(std::string_view kernel, const Problem& problem,
                                  const DeviceInfo& device);

}  // namespace fa101
