#include "profile/report.h"

#include <fa101/version.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <utility>

namespace fa101::profile {
namespace {

using Json = nlohmann::ordered_json;

template <class... Args>
std::string format(const char* pattern, Args... args) {
    char text[512];
    std::snprintf(text, sizeof(text), pattern, args...);
    return text;
}

// Four significant digits without an exponent; "-" for what is not known.
std::string digits(double x) {
    if (x <= 0 || !std::isfinite(x)) return "-";
    const int decimals = std::clamp(3 - static_cast<int>(std::floor(std::log10(x))), 0, 6);
    return format("%.*f", decimals, x);
}

double speed_up(const Row& row) { return row.median > 0 ? row.naive_median / row.median : 0; }

bool was_run(const Row& row) {
    return row.status != Status::kNotRun && row.status != Status::kError;
}

std::string csv_field(const std::string& text) {
    if (text.find_first_of(",\"\n") == std::string::npos) return text;
    std::string quoted = "\"";
    for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
    return quoted + "\"";
}

std::string describe(const Sizes& s) {
    std::string text =
        "batch " + std::to_string(s.batch) + ", heads " + std::to_string(s.num_heads);
    if (s.num_heads_kv != s.num_heads) text += " (" + std::to_string(s.num_heads_kv) + " kv)";
    text += ", seq-len " + std::to_string(s.seqlen_q);
    if (s.seqlen_k != s.seqlen_q) text += " x " + std::to_string(s.seqlen_k);
    return text + ", dim " + std::to_string(s.head_dim);
}

Json json_of(const Sizes& sizes) {
    return {{"batch", sizes.batch},
            {"num_heads", sizes.num_heads},
            {"num_heads_kv", sizes.num_heads_kv},
            {"seqlen_q", sizes.seqlen_q},
            {"seqlen_k", sizes.seqlen_k},
            {"head_dim", sizes.head_dim}};
}

Json json_of(const Row& row) {
    Json json = {{"kernel", row.kernel}, {"status", name_of(row.status)}};
    if (!was_run(row)) {
        json["reason"] = row.reason;
        return json;
    }
    if (row.comparison) {
        const testing::Comparison& c = *row.comparison;
        json["check"] = {{"max_error", c.max_error},
                         {"tolerance", row.tolerance},
                         {"worst", c.worst},
                         {"actual", c.actual},
                         {"expected", c.expected}};
    }
    const auto known = [](double x) { return x > 0 ? Json(x) : Json(nullptr); };
    json["naive_seconds"] = known(row.naive_median);
    json["median_seconds"] = row.median;
    json["lower_quartile_seconds"] = row.lower_quartile;
    json["upper_quartile_seconds"] = row.upper_quartile;
    json["speed_up"] = known(speed_up(row));
    json["tflops"] = row.tflops;
    json["gbytes_per_s"] = row.gbytes_per_s;
    json["peak_share"] = known(row.peak_share);
    json["seconds"] = row.seconds;
    return json;
}

Json json_of(const Arguments& args, DType dtype) {
    const auto number = [](const std::optional<int64_t>& n) { return n ? Json(*n) : Json("auto"); };
    const auto text = [](const std::string& s) { return s.empty() ? Json(nullptr) : Json(s); };
    return {{"preset", args.preset},
            {"sweep", text(args.sweep)},
            {"device", args.device_text},
            {"dtype", name_of(dtype)},
            {"causal", args.causal},
            {"impl", args.kernels.empty() ? Json("all") : Json(args.kernels)},
            {"warmup", number(args.warmup)},
            {"iters", number(args.iters)},
            {"check", args.check},
            {"seed", args.seed},
            {"json", text(args.json_file)},
            {"csv", text(args.csv_file)}};
}

Json json_of(const Backend& backend, DType dtype) {
    const DeviceInfo& info = backend.info;
    const Backend::Peak peak = backend.peak(dtype);
    Json json = {{"type", info.type == DeviceType::kCuda ? "cuda" : "cpu"},
                 {"index", backend.id.index},
                 {"name", info.name},
                 {"summary", backend.summary},
                 {"peak_flops", peak.flops},
                 {"peak_source", peak.source},
                 {"flushed", backend.flush_note()}};
    if (info.type == DeviceType::kCuda) {
        json["arch"] = info.arch;
        json["num_sms"] = info.num_sms;
        json["clock_hz"] = info.clock_hz;
        json["memory_bytes"] = info.memory_bytes;
        json["memory_bandwidth"] = info.memory_bandwidth;
        json["l2_bytes"] = info.l2_bytes;
    } else {
        json["simd"] = name_of(info.simd);
        json["num_threads"] = info.num_threads;
    }
    for (const auto& [name, version] : backend.versions) json[name] = version;
    return json;
}

void write_file(const std::string& option, const std::string& name, const std::string& text) {
    std::ofstream file(name);
    file << text;
    file.close();
    if (!file) throw std::runtime_error(option + ": cannot write '" + name + "'");
}

}  // namespace

void require_writable_files(const Arguments& args) {
    for (const auto& [option, name] :
         {std::pair("--json", args.json_file), {"--csv", args.csv_file}}) {
        if (!name.empty() && !std::ofstream(name, std::ios::app)) {
            throw BadArgument(option, name, "a file that can be written");
        }
    }
}

Report::Report(const Arguments& args, const Backend& backend, DType dtype)
    : args_(args), device_(backend.info.name), dtype_(name_of(dtype)) {
    const BuildInfo build = build_info();
    json_ = {{"fa101", FA101_VERSION},
             {"build", {{"cuda", build.cuda_version}, {"cutlass", build.cutlass_version}}},
             {"device", json_of(backend, dtype)},
             {"options", json_of(args, dtype)},
             {"problems", Json::array()}};

    const Backend::Peak peak = backend.peak(dtype);
    std::printf("fa101 " FA101_VERSION "\ndevice   %s\n", backend.summary.c_str());
    std::printf("peak     %s TFLOP/s in %s (%s)\n", digits(peak.flops / 1e12).c_str(),
                dtype_.c_str(), peak.source.c_str());
    std::printf("timing   median of repeated runs, spread = interquartile range; %s\n",
                backend.flush_note().c_str());
}

void Report::begin(const Sizes& sizes, const Workload* workload) {
    sizes_ = sizes;
    Json problem = json_of(sizes);
    problem["dtype"] = dtype_;
    problem["causal"] = args_.causal;
    std::printf("\nproblem  %s, %s%s", describe(sizes).c_str(), dtype_.c_str(),
                args_.causal ? ", causal" : "");
    if (workload != nullptr) {
        problem["flops"] = workload->flops();
        std::printf(": %s GFLOP", digits(workload->flops() / 1e9).c_str());
    }
    if (workload != nullptr && args_.check) {
        const int64_t step = workload->row_step;
        problem["checked_every_nth_row"] = step;
        const std::string which =
            step == 1 ? "every element" : "one row in " + std::to_string(step) + " of every head";
        std::printf("\ncheck    %s of O against float64, |difference| <= %.2g", which.c_str(),
                    workload->tolerance);
    }
    problem["rows"] = Json::array();
    json_["problems"].push_back(std::move(problem));
    std::printf("\n\n%-12s %-9s %9s %11s %11s %8s %9s %9s %8s %8s\n", "kernel", "check",
                "max error", "naive ms", "latency ms", "spread", "speed-up", "TFLOP/s", "of peak",
                "GB/s");
    std::fflush(stdout);
}

void Report::add(const Row& row) {
    rows_.push_back(row);
    json_["problems"].back()["rows"].push_back(json_of(row));
    add_to_csv(row);
    if (was_run(row)) {
        const std::string error = row.comparison ? format("%.2e", row.comparison->max_error) : "-";
        const std::string factor = row.naive_median > 0 ? digits(speed_up(row)) + "x" : "-";
        const std::string share = row.peak_share > 0 ? format("%.1f%%", 100 * row.peak_share) : "-";
        const double spread = (row.upper_quartile - row.lower_quartile) / row.median;
        std::printf("%-12s %-9s %9s %11s %11s %7.1f%% %9s %9s %8s %8s\n", row.kernel.c_str(),
                    name_of(row.status), error.c_str(), digits(1e3 * row.naive_median).c_str(),
                    digits(1e3 * row.median).c_str(), 100 * spread, factor.c_str(),
                    digits(row.tflops).c_str(), share.c_str(), digits(row.gbytes_per_s).c_str());
    } else {
        std::printf("%-12s %s: %s\n", row.kernel.c_str(), name_of(row.status), row.reason.c_str());
    }
    if (row.status == Status::kFailed && row.comparison) {
        std::printf("%-12s %s; allowed %.2g\n", "", row.comparison->describe().c_str(),
                    row.tolerance);
    }
    std::fflush(stdout);
}

void Report::add_to_csv(const Row& row) {
    const auto number = [&](double x) { return was_run(row) && x > 0 ? format("%.9g", x) : ""; };
    const std::pair<const char*, std::string> fields[] = {
        {"fa101", FA101_VERSION},
        {"device", device_},
        {"dtype", dtype_},
        {"batch", std::to_string(sizes_.batch)},
        {"num_heads", std::to_string(sizes_.num_heads)},
        {"num_heads_kv", std::to_string(sizes_.num_heads_kv)},
        {"seqlen_q", std::to_string(sizes_.seqlen_q)},
        {"seqlen_k", std::to_string(sizes_.seqlen_k)},
        {"head_dim", std::to_string(sizes_.head_dim)},
        {"causal", args_.causal ? "true" : "false"},
        {"kernel", row.kernel},
        {"status", name_of(row.status)},
        {"max_error", row.comparison ? format("%.9g", row.comparison->max_error) : ""},
        {"tolerance", row.comparison ? format("%.9g", row.tolerance) : ""},
        {"naive_ms", number(1e3 * row.naive_median)},
        {"median_ms", number(1e3 * row.median)},
        {"lower_quartile_ms", number(1e3 * row.lower_quartile)},
        {"upper_quartile_ms", number(1e3 * row.upper_quartile)},
        {"runs", std::to_string(row.seconds.size())},
        {"speed_up", number(speed_up(row))},
        {"tflops", number(row.tflops)},
        {"gbytes_per_s", number(row.gbytes_per_s)},
        {"peak_share", number(row.peak_share)},
        {"reason", row.reason},
    };
    std::string head, line;
    for (const auto& [name, value] : fields) {
        const char* separator = head.empty() ? "" : ",";
        head += separator + std::string(name);
        line += separator + csv_field(value);
    }
    if (csv_.empty()) csv_ = head + "\n";
    csv_ += line + "\n";
}

void Report::write_files() const {
    if (!args_.json_file.empty()) write_file("--json", args_.json_file, json_.dump(2) + "\n");
    if (!args_.csv_file.empty()) write_file("--csv", args_.csv_file, csv_);
}

}  // namespace fa101::profile
