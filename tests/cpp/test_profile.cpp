// The profiler's parts: options, statistics, checks and exit codes.

#include "common/built_head_dims.h"
#include "profile/backend.h"
#include "profile/measure.h"
#include "profile/options.h"
#include "profile/support.h"

#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

using namespace fa101::profile;
using fa101::DType;
using fa101::is_compiled;

Arguments parse(std::vector<const char*> options) {
    options.insert(options.begin(), "profile-attention");
    return parse_arguments(static_cast<int>(options.size()), options.data());
}

Row row_with(Status status) {
    Row row;
    row.status = status;
    return row;
}

}  // namespace

TEST_CASE("what is not given has a default") {
    const Arguments args = parse({});
    REQUIRE(args.problems.size() == 1);
    const Sizes& sizes = args.problems[0];
    CHECK(sizes.batch == 8);
    CHECK(sizes.num_heads == 16);
    CHECK(sizes.num_heads_kv == 16);
    CHECK(sizes.seqlen_q == 256);
    CHECK(sizes.seqlen_k == 256);
    CHECK(sizes.head_dim == 64);
    CHECK(args.check);
    CHECK_FALSE(args.causal);
    CHECK_FALSE(args.device);
    CHECK_FALSE(args.dtype);
    CHECK_FALSE(args.iters);
    CHECK_FALSE(args.warmup);
    CHECK(args.kernels.empty());
}

TEST_CASE("presets have the sources' shapes, and options overrule them") {
    const struct {
        const char* name;
        int64_t batch, heads, seqlen_q, seqlen_k, dim;
    } presets[] = {{"fa101", 8, 16, 256, 256, 64},         {"llama-7b", 1, 32, 4096, 4096, 128},
                   {"bert-large", 8, 32, 2048, 2048, 128}, {"gpt-4", 1, 16, 2048, 2048, 256},
                   {"large-head", 1, 8, 1024, 1024, 512},  {"massive-head", 1, 4, 512, 512, 1024},
                   {"decode", 1, 8, 1, 8192, 128}};
    for (const auto& preset : presets) {
        const Sizes sizes = parse({"--preset", preset.name}).problems[0];
        CHECK(sizes.batch == preset.batch);
        CHECK(sizes.num_heads == preset.heads);
        CHECK(sizes.num_heads_kv == preset.heads);
        CHECK(sizes.seqlen_q == preset.seqlen_q);
        CHECK(sizes.seqlen_k == preset.seqlen_k);
        CHECK(sizes.head_dim == preset.dim);
    }
    const Sizes sizes = parse({"--preset", "decode", "--batch", "4", "--heads-kv=2"}).problems[0];
    CHECK(sizes.batch == 4);
    CHECK(sizes.num_heads_kv == 2);
    CHECK(sizes.seqlen_k == 8192);
    CHECK(parse({"--seq-len", "512"}).problems[0].seqlen_k == 512);
}

TEST_CASE("a sweep is a geometric series of one size") {
    std::vector<int64_t> lengths;
    for (const Sizes& sizes : parse({"--sweep", "seq-len=256:16384:2"}).problems) {
        CHECK(sizes.seqlen_k == sizes.seqlen_q);
        lengths.push_back(sizes.seqlen_q);
    }
    CHECK(lengths == std::vector<int64_t>{256, 512, 1024, 2048, 4096, 8192, 16384});
    std::vector<int64_t> dims;
    for (const Sizes& sizes : parse({"--sweep", "dim=32:300:3"}).problems) {
        dims.push_back(sizes.head_dim);
    }
    CHECK(dims == std::vector<int64_t>{32, 96, 288});
    for (const char* bad : {"", "seq-len", "seq-len=", "seq-len=1:2", "seq-len=1:2:1",
                            "seq-len=2:1:2", "seq-len=0:4:2", "seq-len=1:99999999:2",
                            "seq-len=1:2:2:2", "seq-len=1:x:2", "impl=1:2:2", "seq-len=1:1e3:2"}) {
        CHECK_THROWS_AS(parse({"--sweep", bad}), BadArgument);
    }
    CHECK_THROWS_AS(parse({"--sweep", "heads=1:4:2", "--heads-kv", "2"}), BadArgument);
}

TEST_CASE("the other options") {
    const Arguments args =
        parse({"--dtype", "bf16", "--causal", "--device", "cuda:2", "--warmup", "0", "--iters", "7",
               "--no-check", "--seed", "5", "--json", "a.json", "--csv", "a.csv"});
    CHECK(args.dtype == DType::kBFloat16);
    CHECK(args.causal);
    CHECK(args.device->type == fa101::DeviceType::kCuda);
    CHECK(args.device->index == 2);
    CHECK(args.warmup == 0);
    CHECK(args.iters == 7);
    CHECK_FALSE(args.check);
    CHECK(args.seed == 5);
    CHECK(args.json_file == "a.json");
    CHECK(args.csv_file == "a.csv");
    CHECK(parse({"--list"}).list);
    CHECK(parse({"--batch", "2", "--batch", "3"}).problems[0].batch == 3);
}

TEST_CASE("exit codes") {
    CHECK(exit_code({}) == 0);
    CHECK(exit_code({row_with(Status::kPassed), row_with(Status::kUnchecked),
                     row_with(Status::kNotRun)}) == 0);
    CHECK(exit_code({row_with(Status::kPassed), row_with(Status::kFailed)}) == 1);
    CHECK(exit_code({row_with(Status::kError), row_with(Status::kPassed)}) == 1);
}

TEST_CASE("median and quartiles") {
    Row row;
    row.seconds = {5, 1, 4, 2, 3};
    summarize(row);
    CHECK(row.lower_quartile == 2);
    CHECK(row.median == 3);
    CHECK(row.upper_quartile == 4);
    CHECK(row.seconds == std::vector<double>{5, 1, 4, 2, 3});  // raw ones stay in order
    row.seconds = {2, 1};
    summarize(row);
    CHECK(row.median == 1.5);
}

TEST_CASE("a kernel is checked against the reference, element by element") {
    const std::unique_ptr<Backend> cpu = open_cpu();
    Arguments args = parse({"--batch", "1", "--heads", "2", "--seq-len", "33", "--dim", "8",
                            "--iters", "2", "--warmup", "1"});
    Workload workload(*cpu, args.problems[0], DType::kFloat32, args);
    const auto profile = [&] {
        return profile_kernel(*cpu, "cpu_naive", workload, true, args, [](const std::string&) {});
    };
    CHECK(workload.flops() == 4.0 * 2 * 33 * 33 * 8);
    CHECK(workload.expected.size() == 2 * 33 * 8);

    const Row good = profile();
    CHECK(good.status == Status::kPassed);
    CHECK(good.seconds.size() == 2);
    CHECK(good.tflops > 0);

    workload.expected[100] = -workload.expected[100];
    const Row wrong = profile();
    CHECK(wrong.status == Status::kFailed);
    CHECK(wrong.comparison->worst == fa101::testing::Shape4{0, 0, 12, 4});
    CHECK(exit_code({good, wrong}) == 1);

    const Row refused =
        profile_kernel(*cpu, "naive", workload, true, args, [](const std::string&) {});
    CHECK(refused.status == Status::kNotRun);
    CHECK(refused.reason == "it runs on CUDA tensors");
}

TEST_CASE("large problems are checked on some rows of every head") {
    fa101::set_cpu_threads(1);  // the fewer threads, the smaller what counts as large
    const std::unique_ptr<Backend> cpu = open_cpu();
    const Arguments args =
        parse({"--batch", "1", "--heads", "2", "--seq-len", "2048", "--dim", "128"});
    const Workload workload(*cpu, args.problems[0], DType::kFloat32, args);
    CHECK(workload.flops() > cpu->reference_budget());
    CHECK(workload.row_step == 3);
    CHECK(workload.expected.size() == 2 * 683 * 128);
    fa101::set_cpu_threads(0);
}

TEST_CASE("what does not fit into memory is refused before it is tried") {
    const std::unique_ptr<Backend> cpu = open_cpu();
    const Arguments args = parse({"--batch", "65536", "--heads", "64", "--seq-len", "4096"});
    CHECK_THROWS_AS(Workload(*cpu, args.problems[0], DType::kFloat32, args), OutOfMemory);
    CHECK_THROWS_AS(cpu->allocate(int64_t{1} << 60, "everything"), OutOfMemory);
    CHECK(describe_bytes(68719476736.0) == "68.7 GB");
    CHECK(describe_bytes(12) == "12 bytes");
}

TEST_CASE("docs/support.md says what the planner says") {
    if (!is_compiled(96) || !is_compiled(256)) {
        MESSAGE("not tested: FA101_HEAD_DIMS leaves tiles out");
        return;
    }
    std::ifstream file(FA101_SUPPORT_PAGE);
    std::stringstream page;
    page << file.rdbuf();
    const std::string tables = "<!-- support -->\n" + support_tables() + "<!-- /support -->";
    CHECK_MESSAGE(page.str().find(tables) != std::string::npos,
                  "paste what profile-attention --support prints");
}
