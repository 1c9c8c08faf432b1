// CLI11 splits the command line and writes --help; the values are read here, so that every error
// has the same words.
#include "profile/options.h"

#include <fa101/plan.h>
#include <fa101/version.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <map>
#include <string_view>
#include <utility>

namespace fa101::profile {
namespace {

constexpr int64_t kMaxRepeats = 1000000;
constexpr int64_t kMaxSeed = 1000000000000000000;
// (query, key) pairs of a problem: float64 counts them exactly and 64-bit sizes cannot overflow.
constexpr double kMaxPairs = 1e15;

struct SizeOption {
    const char* name;
    int64_t Sizes::* field;
    int64_t max;
    const char* help;
};
constexpr SizeOption kSizeOptions[] = {
    {"batch", &Sizes::batch, 65536, "Batch size"},
    {"seq-len", &Sizes::seqlen_q, 16777216, "Queries of a head"},
    {"seq-len-k", &Sizes::seqlen_k, 16777216, "Keys of a head [as --seq-len]"},
    {"heads", &Sizes::num_heads, 65536, "Query heads"},
    {"heads-kv", &Sizes::num_heads_kv, 65536, "Key/value heads, a divisor of --heads [as --heads]"},
    {"dim", &Sizes::head_dim, 65536, "Head dimension"},
};

struct Preset {
    const char* name;
    Sizes sizes;  // batch, heads, queries, keys (0: as many), dim
};
constexpr Preset kPresets[] = {
    {"fa101", {8, 16, 256, 0, 64}},        {"llama-7b", {1, 32, 4096, 0, 128}},
    {"bert-large", {8, 32, 2048, 0, 128}}, {"gpt-4", {1, 16, 2048, 0, 256}},
    {"large-head", {1, 8, 1024, 0, 512}},  {"massive-head", {1, 4, 512, 0, 1024}},
    {"decode", {1, 8, 1, 8192, 128}},
};

struct NamedDType {
    const char* name;
    DType dtype;
};
constexpr NamedDType kDTypes[] = {
    {"float32", DType::kFloat32}, {"float16", DType::kFloat16}, {"bfloat16", DType::kBFloat16},
    {"fp32", DType::kFloat32},    {"fp16", DType::kFloat16},    {"bf16", DType::kBFloat16},
};

// "a, b, c" from anything with names.
template <class Range>
std::string names_of(const Range& range) {
    std::string text;
    for (const auto& item : range) text += std::string(text.empty() ? "" : ", ") + item.name;
    return text;
}

std::string whole_number(int64_t min, int64_t max) {
    return "a whole number from " + std::to_string(min) + " to " + std::to_string(max);
}

// Digits only: no sign but a leading '-', no exponent, no blanks.
std::optional<int64_t> read_whole(std::string_view text) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return value;
}

int64_t read_number(const std::string& option, const std::string& text, int64_t min, int64_t max) {
    const std::optional<int64_t> value = read_whole(text);
    if (!value || *value < min || *value > max) {
        throw BadArgument(option, text, whole_number(min, max));
    }
    return *value;
}

template <class Range>
const auto& find_named(const std::string& option, const std::string& text, const Range& range) {
    for (const auto& item : range) {
        if (text == item.name) return item;
    }
    throw BadArgument(option, text, "one of " + names_of(range));
}

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts(1);
    for (char c : text) {
        if (c == separator) {
            parts.emplace_back();
        } else {
            parts.back() += c;
        }
    }
    return parts;
}

std::vector<std::string> read_kernels(const std::string& text) {
    if (text == "all") return {};
    const std::vector<KernelInfo> known = fa101::kernels();
    std::vector<std::string> names = split(text, ',');
    for (const std::string& name : names) {
        if (std::none_of(known.begin(), known.end(),
                         [&](const KernelInfo& kernel) { return kernel.name == name; })) {
            throw BadArgument("--impl", text,
                              "all, or some of " + names_of(known) + ", separated by commas");
        }
    }
    return names;
}

Device read_device(const std::string& text) {
    if (text == "cpu") return Device{DeviceType::kCpu, 0};
    if (text == "cuda") return Device{DeviceType::kCuda, 0};
    const bool has_index = text.rfind("cuda:", 0) == 0 && text.size() > 5 && text[5] != '-';
    const std::optional<int64_t> index = has_index ? read_whole(text.substr(5)) : std::nullopt;
    if (!index || *index > 1023) throw BadArgument("--device", text, "cpu, cuda or cuda:N");
    return Device{DeviceType::kCuda, static_cast<int>(*index)};
}

Sizes complete(Sizes sizes) {
    if (sizes.seqlen_k == 0) sizes.seqlen_k = sizes.seqlen_q;
    if (sizes.num_heads_kv == 0) sizes.num_heads_kv = sizes.num_heads;
    if (sizes.num_heads % sizes.num_heads_kv != 0) {
        throw BadArgument("--heads is '" + std::to_string(sizes.num_heads) +
                          "' and --heads-kv is '" + std::to_string(sizes.num_heads_kv) +
                          "'; --heads must be a multiple of --heads-kv");
    }
    const double pairs = static_cast<double>(sizes.batch) * static_cast<double>(sizes.num_heads) *
                         static_cast<double>(sizes.seqlen_q) * static_cast<double>(sizes.seqlen_k);
    if (pairs > kMaxPairs) {
        throw BadArgument("--batch, --heads, --seq-len and --seq-len-k are '" +
                          std::to_string(sizes.batch) + "', '" + std::to_string(sizes.num_heads) +
                          "', '" + std::to_string(sizes.seqlen_q) + "' and '" +
                          std::to_string(sizes.seqlen_k) + "'; their product must be at most 1e15");
    }
    return sizes;
}

// seq-len=256:16384:2 is 256, 512, ... 16384.
std::vector<Sizes> read_sweep(const std::string& text, const Sizes& base) {
    const auto bad = [&](const std::string& why) {
        return BadArgument("--sweep", text,
                           "NAME=FIRST:LAST:FACTOR, as in seq-len=256:16384:2, " + why);
    };
    const size_t equals = text.find('=');
    const std::string name = text.substr(0, equals);
    const auto option = std::find_if(std::begin(kSizeOptions), std::end(kSizeOptions),
                                     [&](const SizeOption& o) { return name == o.name; });
    if (equals == std::string::npos || option == std::end(kSizeOptions)) {
        throw bad("with NAME one of " + names_of(kSizeOptions));
    }
    std::vector<int64_t> numbers;
    for (const std::string& part : split(text.substr(equals + 1), ':')) {
        numbers.push_back(read_whole(part).value_or(-1));
    }
    if (numbers.size() != 3 || numbers[0] < 1 || numbers[1] < numbers[0] ||
        numbers[1] > option->max || numbers[2] < 2 || numbers[2] > option->max) {
        throw bad("with whole numbers, 1 <= FIRST <= LAST <= " + std::to_string(option->max) +
                  " and FACTOR at least 2");
    }
    std::vector<Sizes> problems;
    for (int64_t value = numbers[0]; value <= numbers[1]; value *= numbers[2]) {
        Sizes sizes = base;
        sizes.*option->field = value;
        problems.push_back(complete(sizes));
    }
    return problems;
}

}  // namespace

Arguments parse_arguments(int argc, const char* const* argv) {
    CLI::App app("Checks and times every attention kernel of fa101 on one device.",
                 "profile-attention");
    app.allow_extras();  // reported below, in our words
    std::map<std::string, std::string> given;
    const auto add = [&](const std::string& name, const std::string& type,
                         const std::string& help) {
        app.add_option(name, given[name], help)
            ->type_name(type)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    };
    const auto add_flag = [&](const std::string& name, bool& value, const std::string& help) {
        return app.add_flag(name, value, help)->disable_flag_override();  // no "--causal=7"
    };
    const auto is_given = [&](const std::string& name) { return app.count(name) > 0; };

    Arguments args;
    add("--preset", "NAME", "Sizes that others publish: " + names_of(kPresets) + " [fa101]");
    for (const SizeOption& option : kSizeOptions) {
        add("--" + std::string(option.name), "1.." + std::to_string(option.max), option.help);
    }
    add("--dtype", "NAME",
        "float32, float16, bfloat16 (or fp32, fp16, bf16) [float16 on a GPU, float32 on the CPU]");
    add_flag("--causal", args.causal, "Query i sees keys 0 to i only");
    add("--sweep", "NAME=FIRST:LAST:FACTOR",
        "Repeat for several values of one size, as in seq-len=256:16384:2");
    add("--impl", "NAMES", "Kernels, separated by commas; --list shows them [all of the device]");
    add("--device", "cpu|cuda[:N]", "Where to run [the first GPU if one is usable, else the CPU]");
    add("--warmup", "0.." + std::to_string(kMaxRepeats),
        "Runs before the first timed one; 0 for none [up to 3, fewer if slow]");
    add("--iters", "1.." + std::to_string(kMaxRepeats),
        "Timed runs [up to 100, as many as fit in a second]");
    bool no_check = false;
    CLI::Option* check =
        add_flag("--check", args.check, "Compare with a float64 reference first [the default]");
    add_flag("--no-check", no_check, "Only time")->excludes(check);
    add("--seed", "0.." + std::to_string(kMaxSeed), "Of the random inputs [0]");
    add("--json", "FILE", "Write everything, with every single timing, to FILE");
    add("--csv", "FILE", "Write one line for every row to FILE");
    add_flag("--list", args.list, "List the kernels and leave");
    add_flag("--support", args.support, "Print what every kernel answers, as Markdown, and leave");
    app.set_version_flag("--version", "fa101 " FA101_VERSION);

    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        args.text = app.help();
        return args;
    } catch (const CLI::CallForVersion&) {
        args.text = "fa101 " FA101_VERSION "\n";
        return args;
    } catch (const CLI::ArgumentMismatch& error) {
        const std::string message = error.what();  // "--name: 1 required TYPE missing"
        const size_t colon = message.find(':');
        if (colon == std::string::npos) {  // "name was given a disallowed flag override"
            throw BadArgument("--" + message.substr(0, message.find(' ')) + " takes no value");
        }
        const std::string name = message.substr(0, colon);
        const CLI::Option* option = app.get_option_no_throw(name);
        const std::string type = option != nullptr ? option->get_type_name() : "one";
        throw BadArgument(name + " has no value; it takes " + type);
    } catch (const CLI::ParseError& error) {
        throw BadArgument(error.what());
    }
    args.check = !no_check;

    args.preset = is_given("--preset") ? given["--preset"] : "fa101";
    Sizes sizes = find_named("--preset", args.preset, kPresets).sizes;
    for (const SizeOption& option : kSizeOptions) {
        const std::string name = "--" + std::string(option.name);
        if (is_given(name)) sizes.*option.field = read_number(name, given[name], 1, option.max);
    }
    if (is_given("--sweep")) {
        args.sweep = given["--sweep"];
        args.problems = read_sweep(args.sweep, sizes);
    } else {
        args.problems = {complete(sizes)};
    }
    if (is_given("--dtype")) {
        args.dtype = find_named("--dtype", given["--dtype"], kDTypes).dtype;
    }
    if (is_given("--impl")) args.kernels = read_kernels(given["--impl"]);
    if (is_given("--device")) {
        args.device_text = given["--device"];
        args.device = read_device(args.device_text);
    }
    if (is_given("--warmup")) {
        args.warmup = read_number("--warmup", given["--warmup"], 0, kMaxRepeats);
    }
    if (is_given("--iters")) args.iters = read_number("--iters", given["--iters"], 1, kMaxRepeats);
    if (is_given("--seed")) args.seed = read_number("--seed", given["--seed"], 0, kMaxSeed);
    for (auto [name, file] : {std::pair{"--json", &args.json_file}, {"--csv", &args.csv_file}}) {
        if (!is_given(name)) continue;
        *file = given[name];
        if (file->empty()) throw BadArgument(name, "", "the name of a file to write");
    }
    // Last: in "--batch --heads 2" it is --batch that lacks a value, though 2 is left over.
    if (const std::vector<std::string> extras = app.remaining(); !extras.empty()) {
        throw BadArgument("'" + extras[0] + "' is not an option; --help lists them");
    }
    return args;
}

}  // namespace fa101::profile
