// What the user asked for on the command line.
#pragma once

#include <fa101/params.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fa101::profile {

// One line naming the option, its value and what is allowed: exit code 2.
struct BadArgument : std::runtime_error {
    using std::runtime_error::runtime_error;
    BadArgument(const std::string& option, const std::string& value, const std::string& rule)
        : std::runtime_error(option + " is '" + value + "'; it must be " + rule) {}
};

struct Sizes {
    int64_t batch = 0;
    int64_t num_heads = 0;
    int64_t seqlen_q = 0;
    int64_t seqlen_k = 0;  // 0 until complete() makes it seqlen_q
    int64_t head_dim = 0;
    int64_t num_heads_kv = 0;  // 0 until complete() makes it num_heads
};

struct Arguments {
    std::string text;  // for --help and --version: print this and leave
    bool list = false;
    bool support = false;

    std::string preset;
    std::string sweep;
    std::vector<Sizes> problems;  // one, or one for every step of --sweep
    std::optional<DType> dtype;
    bool causal = false;
    std::vector<std::string> kernels;  // empty: all of the device

    std::optional<Device> device;  // empty: the first GPU, or the CPU where there is none
    std::string device_text = "auto";
    std::optional<int64_t> warmup;  // empty: up to 3, less for slow kernels
    std::optional<int64_t> iters;   // empty: up to 100, as many as fit in a second
    bool check = true;
    int64_t seed = 0;
    std::string json_file;
    std::string csv_file;
};

// Throws BadArgument.
Arguments parse_arguments(int argc, const char* const* argv);

}  // namespace fa101::profile
