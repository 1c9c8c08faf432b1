// ./build/profile-attention as its user meets it: what it prints where, and how it exits.
#include <fa101/device_info.h>
#include <fa101/plan.h>
#include <fa101/version.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::string read(const std::filesystem::path& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
}

// A directory of our own, gone with the object.
class Scratch {
  public:
    Scratch() {
        std::string name = (std::filesystem::temp_directory_path() / "fa101-cli-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~Scratch() { std::filesystem::remove_all(path_); }
    std::filesystem::path operator/(const char* file) const { return path_ / file; }

  private:
    std::filesystem::path path_;
};

struct Outcome {
    int code;
    std::string out, err;
};

Outcome profile(const std::string& options) {
    const Scratch scratch;
    const std::string command = "'" FA101_PROFILER "' " + options + " >'" +
                                (scratch / "out").string() + "' 2>'" + (scratch / "err").string() +
                                "'";
    const int status = std::system(command.c_str());
    REQUIRE(WIFEXITED(status));
    return {WEXITSTATUS(status), read(scratch / "out"), read(scratch / "err")};
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

std::vector<std::string> kernels_of(fa101::DeviceType device) {
    std::vector<std::string> names;
    for (const fa101::KernelInfo& kernel : fa101::kernels()) {
        if (kernel.device == device) names.push_back(kernel.name);
    }
    return names;
}

const std::string kTiny = "--device cpu --batch 1 --heads 4 --heads-kv 2 --seq-len 19 --dim 16 ";

}  // namespace

TEST_CASE("a wrong command line: one line on stderr, nothing on stdout, exit 2 (FA-069)") {
    const struct {
        const char* options;
        const char* line;
    } cases[] = {
        {"--batch 0", "--batch is '0'; it must be a whole number from 1 to 65536"},
        {"--seq-len -1", "--seq-len is '-1'; it must be a whole number from 1 to 16777216"},
        {"--heads 3 --heads-kv 2",
         "--heads is '3' and --heads-kv is '2'; --heads must be a multiple of --heads-kv"},
        {"--dim abce", "--dim is 'abce'; it must be a whole number from 1 to 65536"},
        {"--dim 1.5", "--dim is '1.5'; it must be a whole number from 1 to 65536"},
        {"--iters 0", "--iters is '0'; it must be a whole number from 1 to 1000000"},
        {"--warmup -1", "--warmup is '-1'; it must be a whole number from 0 to 1000000"},
        {"--dtype fp17",
         "--dtype is 'fp17'; it must be one of float32, float16, bfloat16, fp32, fp16, bf16"},
        {"--nope", "'--nope' is not an option; --help lists them"},
        {"--nope 3", "'--nope' is not an option; --help lists them"},
        {"extra", "'extra' is not an option; --help lists them"},
        {"''", "'' is not an option; --help lists them"},
        {"--batch", "--batch has no value; it takes 1..65536"},
        {"--json", "--json has no value; it takes FILE"},
        {"--causal=7", "--causal takes no value"},
        {"--check --no-check", "--check excludes --no-check"},
        {"--batch --heads 2", "--batch is '--heads'; it must be a whole number from 1 to 65536"},
        {"--batch ''", "--batch is ''; it must be a whole number from 1 to 65536"},
        {"--batch 99999999999999",
         "--batch is '99999999999999'; it must be a whole number from 1 to 65536"},
        {"--batch 99999999999999999999999",
         "--batch is '99999999999999999999999'; it must be a whole number from 1 to 65536"},
        {"--batch 1e3", "--batch is '1e3'; it must be a whole number from 1 to 65536"},
        {"--batch ' 3'", "--batch is ' 3'; it must be a whole number from 1 to 65536"},
        {"--seed -1", "--seed is '-1'; it must be a whole number from 0 to 1000000000000000000"},
        {"--device gpu", "--device is 'gpu'; it must be cpu, cuda or cuda:N"},
        {"--device cuda:x", "--device is 'cuda:x'; it must be cpu, cuda or cuda:N"},
        {"--preset gpt-5",
         "--preset is 'gpt-5'; it must be one of fa101, llama-7b, bert-large, gpt-4, large-head, "
         "massive-head, decode"},
        {"--sweep seq-len=256",
         "--sweep is 'seq-len=256'; it must be NAME=FIRST:LAST:FACTOR, as in seq-len=256:16384:2, "
         "with whole numbers, 1 <= FIRST <= LAST <= 16777216 and FACTOR at least 2"},
        {"--json ''", "--json is ''; it must be the name of a file to write"},
        {"--device cpu --csv /no/such/folder/file",
         "--csv is '/no/such/folder/file'; it must be a file that can be written"},
        {"--seq-len 16777216",
         "--batch, --heads, --seq-len and --seq-len-k are '8', '16', '16777216' and '16777216'; "
         "their product must be at most 1e15"},
    };
    for (const auto& c : cases) {
        CAPTURE(c.options);
        const Outcome outcome = profile(c.options);
        CHECK(outcome.code == 2);
        CHECK(outcome.out.empty());
        CHECK(outcome.err == "profile-attention: " + std::string(c.line) + "\n");
    }

    const Outcome impl = profile("--impl nope");
    CHECK(impl.code == 2);
    CHECK(impl.out.empty());
    CHECK(contains(impl.err, "--impl is 'nope'; it must be all, or some of "));
    for (const fa101::KernelInfo& kernel : fa101::kernels()) CHECK(contains(impl.err, kernel.name));
    CHECK(std::count(impl.err.begin(), impl.err.end(), '\n') == 1);
}

TEST_CASE("--help, --version and --list") {
    const Outcome help = profile("--help");
    CHECK(help.code == 0);
    CHECK(help.err.empty());
    for (const char* option :
         {"--batch",     "--seq-len",  "--seq-len-k", "--heads",    "--heads-kv",
          "--dim",       "--dtype",    "--causal",    "--impl",     "--device cpu|cuda[:N]",
          "--warmup",    "--iters",    "--check",     "--no-check", "--seed",
          "--json FILE", "--csv FILE", "--list",      "--help",     "--version",
          "--preset",    "--sweep"}) {
        CAPTURE(option);
        CHECK(contains(help.out, option));
    }

    const Outcome version = profile("--version");
    CHECK(version.code == 0);
    CHECK(version.out == "fa101 " FA101_VERSION "\n");

    const Outcome list = profile("--list");
    CHECK(list.code == 0);
    for (const fa101::KernelInfo& kernel : fa101::kernels()) {
        CHECK(contains(list.out, kernel.name));
        CHECK(contains(list.out, kernel.lesson));
    }
}

TEST_CASE("a small run on the CPU: table, JSON and CSV") {
    const Scratch scratch;
    const std::string json_file = (scratch / "r.json").string(),
                      csv_file = (scratch / "r.csv").string();
    const Outcome outcome = profile(kTiny + "--causal --iters 3 --warmup 0 --seed 3 --json '" +
                                    json_file + "' --csv '" + csv_file + "'");
    CHECK(outcome.code == 0);
    CHECK(outcome.err.empty());
    CHECK(contains(outcome.out, "device   cpu: "));
    CHECK(contains(outcome.out, "SIMD "));
    CHECK(contains(outcome.out,
                   "problem  batch 1, heads 4 (2 kv), seq-len 19, dim 16, float32, causal"));
    CHECK_FALSE(contains(outcome.out, "FAILED"));
    CHECK(contains(outcome.out, "of peak     GB/s"));

    const std::vector<std::string> kernels = kernels_of(fa101::DeviceType::kCpu);
    const nlohmann::json json = nlohmann::json::parse(read(json_file));
    CHECK(json["fa101"] == FA101_VERSION);
    CHECK(json["device"]["type"] == "cpu");
    CHECK(json["device"]["simd"] == fa101::name_of(fa101::cpu_simd_level()));
    CHECK(json["options"]["device"] == "cpu");
    CHECK(json["options"]["seed"] == 3);
    CHECK(json["options"]["iters"] == 3);
    CHECK(json["options"]["dtype"] == "float32");
    REQUIRE(json["problems"].size() == 1);
    const nlohmann::json& problem = json["problems"][0];
    CHECK(problem["num_heads_kv"] == 2);
    CHECK(problem["flops"] == 4.0 * 4 * (19 * 20 / 2) * 16);
    REQUIRE(problem["rows"].size() == kernels.size());
    for (size_t i = 0; i < kernels.size(); ++i) {
        const nlohmann::json& row = problem["rows"][i];
        CHECK(row["kernel"] == kernels[i]);
        CHECK(row["status"] == "passed");
        CHECK(row["check"]["max_error"] <= row["check"]["tolerance"]);
        CHECK(row["seconds"].size() == 3);
        const double bytes = 4.0 * 16 * 19 * (2 * 4 + 2 * 2);  // q and o, k and v
        const double seconds = row["median_seconds"];
        CHECK(row["gbytes_per_s"] == doctest::Approx(1e-9 * bytes / seconds));
        CHECK(row["naive_seconds"] == problem["rows"][0]["median_seconds"]);
    }

    std::istringstream csv(read(csv_file));
    std::vector<std::string> lines;
    for (std::string line; std::getline(csv, line);) lines.push_back(line);
    REQUIRE(lines.size() == 1 + kernels.size());
    const auto commas = [](const std::string& s) { return std::count(s.begin(), s.end(), ','); };
    CHECK(lines[0].rfind("fa101,device,dtype,batch,", 0) == 0);
    CHECK(contains(lines[0], ",tflops,gbytes_per_s,"));
    for (size_t i = 0; i < kernels.size(); ++i) {
        CHECK(contains(lines[1 + i], "," + kernels[i] + ",passed,"));
        CHECK(commas(lines[1 + i]) >= commas(lines[0]));
    }
}

TEST_CASE("one kernel is still compared with naive") {
    const std::vector<std::string> kernels = kernels_of(fa101::DeviceType::kCpu);
    const Scratch scratch;
    const std::string file = (scratch / "r.json").string();
    const Outcome outcome = profile(kTiny + "--no-check --iters 1 --warmup 1 --dtype bf16 --impl " +
                                    kernels.back() + " --json '" + file + "'");
    CHECK(outcome.code == 0);
    const nlohmann::json rows = nlohmann::json::parse(read(file))["problems"][0]["rows"];
    REQUIRE(rows.size() == 1);
    CHECK(rows[0]["kernel"] == kernels.back());
    CHECK(rows[0]["status"] == "unchecked");
    CHECK(rows[0]["naive_seconds"] > 0);
    CHECK(rows[0]["speed_up"] > 0);
}

TEST_CASE("a sweep has one table for every size") {
    const Outcome outcome = profile(kTiny + "--iters 1 --warmup 0 --sweep seq-len=1:9:3");
    CHECK(outcome.code == 0);
    for (const char* length : {"seq-len 1,", "seq-len 3,", "seq-len 9,"}) {
        CHECK(contains(outcome.out, length));
    }
}

TEST_CASE("out of memory says how much was asked, and is no failure") {
    const Outcome outcome =
        profile("--device cpu --batch 65536 --heads 64 --seq-len 4096 --dim 1024 --iters 1");
    CHECK(outcome.code == 0);
    CHECK(contains(outcome.out, "not run: out of memory: q, k, v and o asks for 281 TB, "));
}

TEST_CASE("kernels that cannot answer say why") {
    const std::vector<std::string> kernels = kernels_of(fa101::DeviceType::kCuda);
    REQUIRE_FALSE(kernels.empty());
    const Outcome outcome = profile(kTiny + "--impl " + kernels[0]);
    CHECK(outcome.code == 0);
    CHECK(contains(outcome.out, "not run: it runs on CUDA tensors"));
}

TEST_CASE("without a GPU the CPU is profiled, and says so") {
    std::string reason;
    if (fa101::cuda_device_count(&reason) > 0) return;
    const Outcome outcome = profile("--seq-len 8 --iters 1 --warmup 0");
    CHECK(outcome.code == 0);
    CHECK(outcome.out.rfind(
              "Profiling the CPU kernels, as there is no usable GPU: " + reason + "\n", 0) == 0);

    const Outcome cuda = profile("--device cuda");
    CHECK(cuda.code == 2);
    CHECK(cuda.out.empty());
    CHECK(cuda.err ==
          "profile-attention: --device is 'cuda'; it must be cpu, as there is no usable "
          "GPU: " +
              reason + "\n");
}
