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

std::string csv_line(const std::vector<std::string>& fields) {
    std::string line;
    for (const std::string& field : fields) line += (line.empty() ? "" : ",") + csv_field(field);
    return line + "\n";
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
    json["peak_share"] = known(row.peak_share);
    json["seconds"] = row.seconds;
    return json;
}

Json json_of(const Arguments& args, DType dtype) {
    const auto number = [](const std::optional<int64_t>& n) { return n ? Json(*n) : Json("auto"); };
    const auto text = [](const std::string& s) { return s.empty() ? Json(nullptr) : Json(s); };
    return {{"preset", args.preset},
            {"sweep", text(args.sweep)},
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
    csv_ = csv_line({"fa101",
                     "device",
                     "dtype",
                     "batch",
                     "num_heads",
                     "num_heads_kv",
                     "seqlen_q",
                     "seqlen_k",
                     "head_dim",
                     "causal",
                     "kernel",
                     "status",
                     "max_error",
                     "tolerance",
                     "naive_ms",
                     "median_ms",
                     "lower_quartile_ms",
                     "upper_quartile_ms",
                     "runs",
                     "speed_up",
                     "tflops",
                     "peak_share",
                     "reason"});

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
    std::string heads = std::to_string(sizes.num_heads);
    if (sizes.num_heads_kv != sizes.num_heads)
        heads += " (" + std::to_string(sizes.num_heads_kv) + " kv)";
    std::string seqlen = std::to_string(sizes.seqlen_q);
    if (sizes.seqlen_k != sizes.seqlen_q) seqlen += " x " + std::to_string(sizes.seqlen_k);
    std::printf("\nproblem  batch %lld, heads %s, seq-len %s, dim %lld, %s%s",
                static_cast<long long>(sizes.batch), heads.c_str(), seqlen.c_str(),
                static_cast<long long>(sizes.head_dim), dtype_.c_str(),
                args_.causal ? ", causal" : "");
    if (workload != nullptr) {
        problem["flops"] = workload->flops();
        problem["checked_every_nth_row"] = args_.check ? Json(workload->row_step) : Json(nullptr);
        std::printf(": %s GFLOP", digits(workload->flops() / 1e9).c_str());
        if (args_.check) {
            const int64_t step = workload->row_step;
            const std::string which = step == 1
                                          ? "every element"
                                          : "one row in " + std::to_string(step) + " of every head";
            std::printf("\ncheck    %s of O against float64, |difference| <= %.2g", which.c_str(),
                        workload->tolerance);
        }
    }
    problem["rows"] = Json::array();
    json_["problems"].push_back(std::move(problem));
    std::printf("\n\n%-12s %-9s %9s %11s %11s %8s %9s %9s %8s\n", "kernel", "check", "max error",
                "naive ms", "latency ms", "spread", "speed-up", "TFLOP/s", "of peak");
    std::fflush(stdout);
}

void Report::add(const Row& row) {
    rows_.push_back(row);
    json_["problems"].back()["rows"].push_back(json_of(row));
    const auto number = [&](double x) { return was_run(row) && x > 0 ? format("%.9g", x) : ""; };
    csv_ += csv_line({FA101_VERSION,
                      device_,
                      dtype_,
                      std::to_string(sizes_.batch),
                      std::to_string(sizes_.num_heads),
                      std::to_string(sizes_.num_heads_kv),
                      std::to_string(sizes_.seqlen_q),
                      std::to_string(sizes_.seqlen_k),
                      std::to_string(sizes_.head_dim),
                      args_.causal ? "true" : "false",
                      row.kernel,
                      name_of(row.status),
                      row.comparison ? format("%.9g", row.comparison->max_error) : "",
                      row.comparison ? format("%.9g", row.tolerance) : "",
                      number(1e3 * row.naive_median),
                      number(1e3 * row.median),
                      number(1e3 * row.lower_quartile),
                      number(1e3 * row.upper_quartile),
                      std::to_string(row.seconds.size()),
                      number(speed_up(row)),
                      number(row.tflops),
                      number(row.peak_share),
                      row.reason});

    if (!was_run(row)) {
        std::printf("%-12s %s: %s\n", row.kernel.c_str(), name_of(row.status), row.reason.c_str());
    } else {
        const std::string error = row.comparison ? format("%.2e", row.comparison->max_error) : "-";
        const double spread = (row.upper_quartile - row.lower_quartile) / row.median;
        std::printf("%-12s %-9s %9s %11s %11s %7.1f%% %8sx %9s %8s\n", row.kernel.c_str(),
                    name_of(row.status), error.c_str(), digits(1e3 * row.naive_median).c_str(),
                    digits(1e3 * row.median).c_str(), 100 * spread, digits(speed_up(row)).c_str(),
                    digits(row.tflops).c_str(),
                    row.peak_share > 0 ? format("%.1f%%", 100 * row.peak_share).c_str() : "-");
    }
    if (row.status == Status::kFailed && row.comparison) {
        std::printf("             %s; allowed %.2g\n", row.comparison->describe().c_str(),
                    row.tolerance);
    }
    std::fflush(stdout);
}

void Report::write_files() const {
    if (!args_.json_file.empty()) write_file("--json", args_.json_file, json_.dump(2) + "\n");
    if (!args_.csv_file.empty()) write_file("--csv", args_.csv_file, csv_);
}

}  // namespace fa101::profile
