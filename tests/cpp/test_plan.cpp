// The planner for devices this machine need not have.
#include <fa101/error.h>
#include <fa101/plan.h>

#include "common/tile_order.h"
#include "kernel_family.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>

using namespace fa101;

namespace {

DeviceInfo gpu(const char* name, int arch, int num_sms, int64_t smem_per_block) {
    DeviceInfo info;
    info.type = DeviceType::kCuda;
    info.name = name;
    info.arch = arch;
    info.num_sms = num_sms;
    info.smem_per_block = smem_per_block;
    return info;
}

const DeviceInfo kT4 = gpu("T4", 75, 40, 64 * 1024);
const DeviceInfo kA100 = gpu("A100", 80, 108, 163 * 1024);
const DeviceInfo kRtx3090 = gpu("RTX 3090", 86, 82, 99 * 1024);
const DeviceInfo kH200 = gpu("H200", 90, 132, 227 * 1024);

DeviceInfo laptop() {
    DeviceInfo info;
    info.name = "laptop";
    info.num_threads = 8;
    return info;
}

Problem problem(DeviceType device, DType dtype, int64_t head_dim, int64_t seqlen = 1024) {
    Problem p;
    p.batch = 2, p.num_heads = 8, p.num_heads_kv = 8;
    p.seqlen_q = p.seqlen_k = p.mask_right = seqlen;
    p.head_dim = p.head_dim_v = head_dim;
    p.device = device;
    p.dtype_q = p.dtype_kv = p.dtype_o = dtype;
    p.softmax_scale = 0.125f;
    p.aligned16 = p.tma = true;
    return p;
}

std::string picked(const Problem& p, const DeviceInfo& device) { return plan(p, device).kernel; }

template <class Exception, class Call>
std::string message(Call call) {
    try {
        call();
    } catch (const Exception& error) {
        return error.what();
    }
    return "no error";
}

bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

}  // namespace

TEST_CASE("auto takes the highest rung that fits") {
    const auto cuda = DeviceType::kCuda;
    for (const DeviceInfo& device : {kA100, kRtx3090, kH200}) {
        CAPTURE(device.name);
        const char* tensor_cores = device.arch == 90 ? "sm90" : "fa2_cute";
        CHECK(picked(problem(cuda, DType::kFloat16, 64), device) == tensor_cores);
        CHECK(picked(problem(cuda, DType::kBFloat16, 128), device) == tensor_cores);
        CHECK(picked(problem(cuda, DType::kFloat16, 40), device) == tensor_cores);
        CHECK(picked(problem(cuda, DType::kFloat16, 192), device) == tensor_cores);
        CHECK(picked(problem(cuda, DType::kFloat16, 512), device) == tensor_cores);
        Problem odd = problem(cuda, DType::kFloat16, 33);
        odd.aligned16 = odd.tma = false;
        CHECK(picked(odd, device) == "fa2_cute");
        CHECK(picked(problem(cuda, DType::kFloat32, 64), device) == "fa2_cute");
        CHECK(picked(problem(cuda, DType::kFloat32, 512), device) == "fa2_cute");
    }
    CHECK(picked(problem(cuda, DType::kFloat16, 64), kT4) == "fa2_cute");
    CHECK(picked(problem(cuda, DType::kBFloat16, 64), kT4) == "fa2");
    CHECK(picked(problem(cuda, DType::kFloat32, 64), kT4) == "fa2");
    CHECK(picked(problem(DeviceType::kCpu, DType::kFloat32, 64), laptop()) == "cpu_fa2");
    CHECK(picked(problem(DeviceType::kCpu, DType::kBFloat16, 1000), laptop()) == "cpu_fa2");
}

TEST_CASE("auto in float32 splits the keys where queries are few; without tensor cores, naive") {
    Problem decode = problem(DeviceType::kCuda, DType::kFloat32, 128, 8192);
    decode.batch = 1;
    decode.seqlen_q = 1;
    for (const DeviceInfo& device : {kA100, kRtx3090, kH200}) {
        CAPTURE(device.name);
        const Plan chosen = plan(decode, device);
        CHECK(std::string(chosen.kernel) == "fa2_cute");
        CHECK(chosen.strategy == Strategy::kSplitKV);
        CHECK(chosen.num_splits > 8);  // blocks for half of the slots or more
        CHECK(std::string(plan(decode, device, "auto", "split_q").kernel) == "fa2_cute");
    }
    CHECK(picked(decode, kT4) == "naive");
    CHECK(contains(plan(decode, kT4).reason, "too few queries"));
    decode.batch = 64;
    CHECK(picked(decode, kT4) == "fa2");
    CHECK(plan(decode, kH200).num_splits == 1);
    CHECK(plan(problem(DeviceType::kCuda, DType::kFloat32, 128), kH200).strategy ==
          Strategy::kSplitQ);
    decode.dtype_q = decode.dtype_kv = decode.dtype_o = DType::kFloat16;
    decode.batch = 1;
    CHECK(picked(decode, kA100) == "fa2_cute");
    CHECK(std::string(plan(decode, kA100, "auto", "split_q").kernel) == "fa2_cute");
}

TEST_CASE("the capacity of a cache does not choose the kernel") {
    for (int64_t batch : {1, 8, 64}) {
        for (int64_t seqlen_q : {1, 5, 16, 128}) {
            Problem p = problem(DeviceType::kCuda, DType::kBFloat16, 128, 512);
            p.batch = batch, p.num_heads = 32, p.num_heads_kv = 8, p.seqlen_q = seqlen_q;
            p.has_seqlens_k = true;
            const Plan small = plan(p, kH200);
            for (int64_t capacity : {1024, 8192, 65536}) {
                CAPTURE(batch);
                CAPTURE(seqlen_q);
                CAPTURE(capacity);
                p.seqlen_k = capacity;
                const Plan large = plan(p, kH200);
                CHECK(std::string(large.kernel) == small.kernel);
                CHECK(large.strategy == small.strategy);
            }
        }
    }
}

TEST_CASE("keys are split where there are enough of them") {
    Problem p = problem(DeviceType::kCuda, DType::kBFloat16, 128);
    p.batch = 1, p.num_heads = 32, p.num_heads_kv = 8, p.mask_right = Problem::kUnbounded;
    const auto strategy = [&](int64_t seqlen_q, int64_t seqlen_k) {
        p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
        return plan(p, kH200).strategy;
    };
    CHECK(strategy(1, 128) == Strategy::kSplitKV);
    CHECK(strategy(8, 512) == Strategy::kSplitQ);
    CHECK(strategy(8, 16384) == Strategy::kSplitKV);
    CHECK(strategy(64, 16384) == Strategy::kSplitKV);
    CHECK(strategy(256, 16384) == Strategy::kSplitKV);
    CHECK(strategy(512, 16384) == Strategy::kSplitQ);  // 128 tiles
    p.tma = false;                                     // fa2_cute's splits beside its own tiles
    CHECK(strategy(8, 16384) == Strategy::kSplitKV);
    CHECK(strategy(256, 16384) == Strategy::kSplitQ);
}

TEST_CASE("sm90 splits keys where multiprocessors idle and parts pay; lengths do not count") {
    Problem p = problem(DeviceType::kCuda, DType::kBFloat16, 128, 8192);
    p.batch = 1, p.num_heads = 32, p.num_heads_kv = 8, p.seqlen_q = 32;  // 8 tiles
    const auto picks = [&p](const char* kernel, int splits) {
        const Plan chosen = plan(p, kH200);
        return chosen.strategy == Strategy::kSplitKV && chosen.kernel == std::string(kernel) &&
               (splits == 0 || chosen.num_splits == splits);
    };
    CHECK(picks("sm90", 10));
    CHECK(plan(p, kH200).workspace_bytes == 4 * 32 * 32 * 10 * (1 + 128));
    CHECK(plan(p, kH200).tile.block_m == 128);
    p.seqlen_q = 17;  // of 4 heads
    CHECK(plan(p, kH200, "sm90").tile.block_m == 128);
    p.seqlen_q = 16;
    CHECK(plan(p, kH200, "sm90").tile.block_m == 64);
    p.seqlen_q = 32;
    p.seqlen_k = 2048;
    CHECK(picks("sm90", 8));
    p.seqlen_q = 256, p.seqlen_k = 1024;  // 64 tiles: 256 rows a tile to be merged, for 512 keys
    CHECK(std::string(plan(p, kH200).kernel) == "sm90");
    CHECK(plan(p, kH200).strategy == Strategy::kSplitQ);
    p.seqlen_k = 2048;
    p.seqlen_q = 4;  // 16 rows are for a smaller tile
    CHECK(picks("fa2_cute", 0));
    CHECK(std::string(plan(p, kH200, "sm90", "split_kv").kernel) == "sm90");
    p.seqlen_q = 128, p.seqlen_k = 65536;
    CHECK(picks("sm90", 4));  // 32 tiles
    p.num_splits = 7;
    CHECK(picks("sm90", 7));
    p.num_splits = 1000000;
    CHECK(picks("sm90", 512));  // steps
    p.num_splits = 0;

    p.has_seqlens_k = p.diagonal_follows_seqlens_k = true;
    for (int64_t capacity : {4096, 8192, 1 << 20}) {
        p.seqlen_k = capacity;
        CHECK(picks("sm90", 4));
    }
    p.seqlen_k = 300;  // a full cache is not worth two
    CHECK(picks("sm90", 1));
    p.seqlen_k = 8192;
    Problem cache = p;  // steps of twins do not count here
    cache.head_dim = cache.head_dim_v = 64;
    for (int64_t capacity : {700, 1024, 2048}) {
        cache.seqlen_k = capacity;
        CHECK(plan(cache, kH200).tile.packed_heads == 1);
    }
    p.batch = 64;  // nothing to split, but sm90 reads the lengths
    CHECK(picks("sm90", 1));
    CHECK(contains(plan(p, kH200).reason, "the highest rung that reads seqlens_k"));
    CHECK(plan(p, kH200).workspace_bytes == 0);
    p.page_size = 16;
    CHECK(picks("fa2_cute", 0));
    CHECK(contains(plan(p, kH200).reason, "sm90 by split_kv: it reads no pages"));
    p.page_size = 0, p.softcap = 30;
    CHECK(picks("fa2_cute", 0) == (plan(p, kH200).strategy == Strategy::kSplitKV));
    CHECK(std::string(plan(p, kH200).kernel) == "fa2_cute");
    p.softcap = 0, p.seqlen_k = 0;
    CHECK(picks("sm90", 1));

    // A window that the capacity does not reach is one all the same.
    p.batch = 1, p.diagonal_follows_seqlens_k = true;
    for (int64_t capacity : {4096, 8192}) {
        p.seqlen_k = capacity, p.mask_left = capacity - p.seqlen_q - 5000;
        CHECK(std::string(plan(p, kH200).kernel) == "fa2_cute");
    }

    // What no query sees is not worth a part.
    Problem top_left = problem(DeviceType::kCuda, DType::kBFloat16, 128, 65536);
    top_left.batch = 1, top_left.seqlen_q = 64, top_left.mask_right = 0;
    CHECK(plan(top_left, kH200).strategy == Strategy::kSplitQ);

    // Heads are packed by powers of two: 4 of a group of 20.
    Problem odd = problem(DeviceType::kCuda, DType::kBFloat16, 128, 8192);
    odd.batch = 8, odd.num_heads = 40, odd.num_heads_kv = 2, odd.seqlen_q = 1;
    CHECK(std::string(plan(odd, kH200).kernel) == "fa2_cute");
    odd.seqlen_q = 32;
    CHECK(std::string(plan(odd, kH200).kernel) == "sm90");
}

TEST_CASE("what no kernel answers is Unsupported, with each kernel's reason") {
    const Problem p = problem(DeviceType::kCuda, DType::kFloat16, 1025);
    const std::string text = message<Unsupported>([&] { plan(p, kH200); });
    for (const char* part : {"naive", "fa2, fa1: ", "fa2_cute", "sm90", "head_dim", "1025"}) {
        CAPTURE(part);
        CHECK(contains(text, part));
    }
}

TEST_CASE("what TMA cannot address is for fa2_cute, and explain() says so") {
    Problem p = problem(DeviceType::kCuda, DType::kFloat16, 64);
    p.tma = false;
    const Plan chosen = plan(p, kH200);
    CHECK(std::string(chosen.kernel) == "fa2_cute");
    CHECK(contains(explain(chosen, p, kH200), "sm90: TMA cannot address q, k, v or out"));
    CHECK(contains(message<InvalidArgument>([&] { plan(p, kH200, "sm90"); }), "stride"));
    CHECK(contains(message<InvalidArgument>([&] {
                       plan(problem(DeviceType::kCuda, DType::kFloat16, 64), kA100, "sm90");
                   }),
                   "sm_90a"));
}

TEST_CASE("sm90's tile follows the problem; its counter, where needed, is in the workspace") {
    const auto tile = [](int64_t head_dim, int64_t seqlen, bool causal) {
        Problem p = problem(DeviceType::kCuda, DType::kBFloat16, head_dim, seqlen);
        if (causal) p.mask_right = 0;
        return plan(p, kH200, "sm90").tile;
    };
    CHECK(tile(64, 4096, false).block_m == 192);
    CHECK(tile(64, 4096, true).block_m == 192);
    CHECK(tile(64, 256, false).block_m == 128);  // 192 would compute half as many rows again
    CHECK(tile(64, 1024, true).block_m == 128);
    CHECK(tile(64, 1024, false).block_m == 128);  // 128 tiles: less than one for each SM
    CHECK(tile(64, 2048, false).block_m == 128);  // 256 tiles in two waves, as 176 of 192 rows
    CHECK(tile(64, 8192, false).block_m == 192);
    CHECK(tile(128, 1024, false).block_n == 128);
    CHECK(tile(128, 16384, false).block_n == 80);
    CHECK(tile(256, 512, false).block_n == 64);
    CHECK(tile(256, 2048, true).block_n == 64);
    CHECK(tile(256, 16384, false).block_n == 64);
    for (int head_dim : {64, 96, 128, 192, 256}) {
        CHECK(tile(head_dim - 8, 1024, false).head_dim == head_dim);
        CHECK(tile(head_dim, 1024, false).head_dim == head_dim);
    }
    CHECK(tile(96, 2048, false).block_m == 128);
    CHECK(tile(96, 8192, false).block_m == 192);
    CHECK(tile(192, 2048, false).block_m == 128);
    Problem capped = problem(DeviceType::kCuda, DType::kBFloat16, 64, 2048);
    capped.softcap = 30;
    CHECK(picked(capped, kH200) == "sm90");
    CHECK(plan(capped, kH200).tile.block_m == 128);

    const auto workspace = [](int64_t batch, int64_t seqlen, bool causal) {
        Problem p = problem(DeviceType::kCuda, DType::kBFloat16, 64, seqlen);
        p.batch = batch;
        if (causal) p.mask_right = 0;
        return plan(p, kH200, "sm90").workspace_bytes;
    };
    CHECK(workspace(16, 256, false) == 0);
    CHECK(workspace(16, 256, true) == 0);  // two blocks an SM: all tiles run at once
    CHECK(workspace(17, 257, true) == 16);
    CHECK(workspace(1, 256, true) == 0);
    CHECK(workspace(100, 257, false) == 16);
    CHECK(workspace(100, 256, false) == 0);  // each block has one tile
}

TEST_CASE("sm90 loads up to 256 keys of head_dim 64 at once, unless that wastes steps") {
    const auto block_n = [](int64_t batch, int64_t keys) {
        Problem p = problem(DeviceType::kCuda, DType::kBFloat16, 64, 256);
        p.batch = batch, p.seqlen_k = keys;
        return plan(p, kH200, "sm90").tile.block_n;
    };
    for (int64_t batch : {1, 8, 16}) {  // up to two tiles an SM
        CHECK(block_n(batch, 1) == 64);
        CHECK(block_n(batch, 197) == 64);
        CHECK(block_n(batch, 256) == 64);
    }
    CHECK(block_n(64, 256) == 64);
    CHECK(block_n(64, 197) == 48);  // 5 steps of 48, 4 of 64
    CHECK(block_n(64, 128) == 64);
    CHECK(block_n(64, 96) == 48);
    CHECK(block_n(16, 257) == 48);
    CHECK(block_n(1, 257) == 128);
    Problem p = problem(DeviceType::kCuda, DType::kBFloat16, 64, 256);
    CHECK(contains(explain(plan(p, kH200), p, kH200), "8 warps"));  // none of them a producer
    p.softcap = 30;
    CHECK(plan(p, kH200, "sm90").tile.block_n == 128);
}

TEST_CASE("sm90 packs heads where few queries do not fill a tile, or to hide fewer keys") {
    Problem p = problem(DeviceType::kCuda, DType::kBFloat16, 128, 8192);
    p.batch = 8, p.num_heads = 32, p.num_heads_kv = 8, p.seqlen_q = 32;
    const auto packed_heads = [&p] { return plan(p, kH200, "sm90").tile.packed_heads; };
    CHECK(packed_heads() == 4);
    CHECK(contains(explain(plan(p, kH200, "sm90"), p, kH200), "128 rows (queries of 4 heads) x"));
    CHECK(plan(p, kH200, "sm90", "split_q").workspace_bytes == 0);  // 64 tiles, not 256
    p.mask_left = p.mask_right - 100;
    CHECK(packed_heads() == 4);
    p.mask_left = -Problem::kUnbounded;
    for (const auto& [heads_kv, expected] :
         {std::pair{1, 16}, {2, 16}, {4, 8}, {16, 2}, {32, 1}}) {  // groups of 32, 16, 8, 2, 1
        p.num_heads_kv = heads_kv;
        CHECK(packed_heads() == expected);
    }
    p.num_heads = 36, p.num_heads_kv = 3;  // a group of 12, then of 9
    CHECK(packed_heads() == 4);
    p.num_heads_kv = 4;
    CHECK(packed_heads() == 1);
    p.num_heads = 32, p.num_heads_kv = 8, p.seqlen_q = 256;  // two whole tiles a head
    CHECK(packed_heads() == 1);
    CHECK(contains(explain(plan(p, kH200, "sm90"), p, kH200), "128 queries x"));

    Problem prompt = problem(DeviceType::kCuda, DType::kBFloat16, 64, 1024);
    prompt.num_heads = 32;
    prompt.mask_right = 0;
    const auto packs = [](const Problem& p) {
        return plan(p, kH200, "sm90").tile.packed_heads > 1;
    };
    CHECK(packs(prompt));
    prompt.mask_right = Problem::kUnbounded;
    CHECK(!packs(prompt));
    for (int64_t head_dim : {96, 128, 256}) {
        Problem wide = problem(DeviceType::kCuda, DType::kBFloat16, head_dim, 2048);
        wide.num_heads = 32, wide.mask_right = 0;
        CHECK(!packs(wide));
    }
    // Rows of packs are counted in 32 bits.
    Problem vast = problem(DeviceType::kCuda, DType::kBFloat16, 64, 2048);
    vast.num_heads = 32, vast.mask_right = 0, vast.seqlen_q = int64_t{1} << 30;
    CHECK(!packs(vast));
}

TEST_CASE("sections of heads: small where causal rows are short, as L2 holds where they are long") {
    const auto sections = [](int64_t seqlen, bool causal) {
        Problem p = problem(DeviceType::kCuda, DType::kBFloat16, 128, seqlen);
        p.batch = 16, p.num_heads = p.num_heads_kv = 16;
        if (causal) p.mask_right = 0;
        const Sections found = choose_sections(p);
        return std::pair{found.heads, found.last_heads};
    };
    CHECK(sections(512, false) == std::pair{1, 1});  // equal tiles go head by head
    CHECK(sections(512, true) == std::pair{16, 128});
    CHECK(sections(4096, true) == std::pair{2, 16});
    CHECK(sections(8192, true) == std::pair{8, 8});
    CHECK(sections(1 << 20, true) == std::pair{1, 1});
    CHECK(sections(16, true) == std::pair{256, 256});  // there are no more
}

TEST_CASE("head_dim_v of its own: the tile holds both; 192 x 128 is a tile") {
    const auto tile = [](int64_t head_dim, int64_t head_dim_v) {
        Problem p = problem(DeviceType::kCuda, DType::kFloat16, head_dim);
        p.head_dim_v = head_dim_v;
        return plan(p, kH200, "sm90").tile;
    };
    CHECK(tile(40, 128).head_dim == 128);
    CHECK(tile(64, 136).head_dim == 192);
    CHECK(tile(192, 256).head_dim == 256);
    for (int64_t head_dim_v : {64, 128, 136, 192}) {
        CHECK(tile(192, head_dim_v).head_dim == 192);
        CHECK(tile(192, head_dim_v).block_n == (head_dim_v <= 128 ? 128 : 112));
    }
}

TEST_CASE("a kernel asked for by name runs or says what would") {
    const Problem p = problem(DeviceType::kCuda, DType::kFloat32, 64);
    for (const char* kernel : {"naive", "fa1", "fa2"}) {
        CHECK(std::string(plan(p, kH200, kernel).kernel) == kernel);
        CHECK(plan(p, kH200, kernel).reason == "asked for by name");
    }
    const std::string unfit = message<InvalidArgument>([&] { plan(p, kH200, "sm90"); });
    CHECK(contains(unfit, "kernel 'sm90' does not fit"));
    CHECK(contains(unfit, "float32"));
    CHECK(unfit.find("it needs float16") == unfit.rfind("it needs float16"));
    CHECK(contains(unfit, "these fit: 'naive', 'fa1', 'fa2', 'fa2_cute'"));
    const std::string unknown = message<InvalidArgument>([&] { plan(p, kH200, "flash9"); });
    CHECK(contains(unknown, "kernel 'flash9' is unknown"));
    CHECK(contains(unknown, "'naive', 'fa1', 'fa2'"));
    CHECK(contains(message<InvalidArgument>([&] { plan(p, kH200, "cpu_fa2"); }),
                   "it runs on CPU tensors"));
    CHECK(contains(message<InvalidArgument>([&] {
                       plan(problem(DeviceType::kCpu, DType::kFloat32, 64), laptop(), "fa2");
                   }),
                   "these fit: 'cpu_naive', 'cpu_fa1', 'cpu_fa2'"));
}

TEST_CASE("a refusal says each reason once, with all whom it is of") {
    Problem p = problem(DeviceType::kCpu, DType::kFloat32, 64);
    CHECK(message<InvalidArgument>([&] { plan(p, laptop(), "sm90"); }) ==
          "kernel 'sm90' does not fit: it runs on CUDA tensors; these fit: 'cpu_naive', 'cpu_fa1', "
          "'cpu_fa2'");
    CHECK(supports("sm90", p, laptop()) == "it runs on CUDA tensors");
    p.num_splits = int64_t{1} << 40;
    CHECK(message<Unsupported>([&] { plan(p, laptop()); }) ==
          "no kernel answers this call: cpu_fa2, cpu_fa1, cpu_naive: it does not split the keys "
          "(num_splits is 1099511627776)");
}

TEST_CASE("a strategy that cannot serve says which can") {
    const Problem p = problem(DeviceType::kCuda, DType::kFloat16, 64);
    CHECK(plan(p, kH200, "auto", "split_q").strategy == Strategy::kSplitQ);
    CHECK(contains(message<InvalidArgument>([&] { plan(p, kH200, "fa1", "split_kv"); }),
                   "kernel 'fa1' has no strategy 'split_kv'; these fit: 'naive', 'fa1'"));
    CHECK(contains(message<InvalidArgument>([&] { plan(p, kH200, "auto", "nope"); }),
                   "strategy 'nope' is unknown; it must be 'auto', 'split_q', 'split_kv' or "
                   "'split_d'; these fit: 'naive'"));
}

TEST_CASE("auto splits the keys where queries are few, head_dim where it is over 256") {
    Problem p = problem(DeviceType::kCuda, DType::kFloat16, 128, 8192);
    CHECK(plan(p, kH200).strategy == Strategy::kSplitQ);
    p.batch = 1, p.seqlen_q = 1;
    const Plan decode = plan(p, kH200);
    CHECK(std::string(decode.kernel) == "fa2_cute");
    CHECK(decode.strategy == Strategy::kSplitKV);
    CHECK(decode.num_splits > 1);
    CHECK(contains(decode.reason, "too few query tiles"));
    CHECK(plan(p, kH200, "sm90", "split_q").strategy == Strategy::kSplitQ);
    p.num_heads = 64;  // a whole group shares a tile
    p.seqlen_q = 8;
    CHECK(plan(p, kH200).strategy == Strategy::kSplitKV);
    p.seqlen_q = 1024;
    CHECK(plan(p, kH200).strategy == Strategy::kSplitQ);
    for (int64_t head_dim : {257, 320, 512, 1000}) {
        const Problem wide = problem(DeviceType::kCuda, DType::kBFloat16, head_dim);
        CHECK(plan(wide, kA100).strategy == Strategy::kSplitD);
        CHECK(contains(message<InvalidArgument>([&] { plan(wide, kA100, "fa2_cute", "split_q"); }),
                       "head_dim is " + std::to_string(head_dim)));
    }
}

TEST_CASE("split_d splits the keys where query tiles are few") {
    for (DType dtype : {DType::kFloat16, DType::kFloat32}) {
        for (int64_t head_dim : {257, 512, 1024}) {
            Problem decode = problem(DeviceType::kCuda, dtype, head_dim, 8192);
            decode.tma = decode.aligned16 = head_dim % 8 == 0;
            decode.batch = 1, decode.seqlen_q = 1;
            for (const DeviceInfo& device : {kA100, kRtx3090, kH200}) {
                CAPTURE(device.name);
                CAPTURE(head_dim);
                const Plan chosen = plan(decode, device);
                CHECK(std::string(chosen.kernel) == "fa2_cute");
                CHECK(chosen.strategy == Strategy::kSplitD);
                CHECK(chosen.num_splits >= 8);
                CHECK(chosen.workspace_bytes >= 4 * 8 * chosen.num_splits * (1 + head_dim));
                // In a longer cache as many splits fill the device.
                Problem longer = decode;
                longer.seqlen_k *= 4;
                CHECK(plan(longer, device).splits_per_wave == chosen.splits_per_wave);
                CHECK(plan(longer, device).num_splits == chosen.splits_per_wave);
            }
        }
        for (int64_t seqlen : {1024, 32768}) {
            const Plan many =
                plan(problem(DeviceType::kCuda, dtype, 512, seqlen), kH200, "fa2_cute");
            CHECK(many.num_splits == 1);
            CHECK(many.workspace_bytes == 0);
        }
    }
    Problem few = problem(DeviceType::kCuda, DType::kFloat16, 512, 8192);
    few.batch = 1, few.seqlen_q = 1;
    CHECK(contains(plan(few, kH200).reason, "too few query tiles"));
    CHECK(std::string(plan(few, kH200, "sm90").kernel) == "sm90");
    few.seqlen_q = 256;  // 32 tiles of 64
    CHECK(picked(few, kH200) == "sm90");
    few.seqlen_q = 1, few.seqlen_k = 100;  // nothing to split
    CHECK(picked(few, kH200) == "sm90");
    // As many keys as queries, not as many as a cache may have.
    Problem prefill = problem(DeviceType::kCuda, DType::kFloat32, 1024, 512);
    prefill.batch = 1, prefill.num_heads = prefill.num_heads_kv = 4;
    CHECK(plan(prefill, kH200).num_splits == 2);
}

TEST_CASE("every head_dim finds a tile in the shared memory of every GPU") {  // FA-042
    for (const DeviceInfo& device : {kT4, kRtx3090, kA100, kH200}) {
        for (int64_t head_dim : {64, 192, 256, 257, 320, 512, 768, 1024}) {
            for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
                for (int64_t seqlen_q : {1, 1024}) {
                    Problem p = problem(DeviceType::kCuda, dtype, head_dim);
                    p.seqlen_q = seqlen_q;
                    CAPTURE(device.name);
                    CAPTURE(head_dim);
                    const Plan chosen = plan(p, device);
                    CHECK(chosen.tile.head_dim >= head_dim);
                    const bool on_tensor_cores =
                        device.arch >= 80 || (dtype == DType::kFloat16 && head_dim <= 256);
                    if (on_tensor_cores && seqlen_q > 1) CHECK(chosen.kernel[0] != 'n');
                }
            }
        }
    }
    DeviceInfo tiny = kA100;
    tiny.smem_per_block = 16 * 1024;
    const Problem p = problem(DeviceType::kCuda, DType::kFloat16, 512);
    CHECK(contains(message<InvalidArgument>([&] { plan(p, tiny, "fa2_cute"); }), "shared memory"));
    CHECK(picked(p, tiny) == "naive");
}

TEST_CASE("window, softcap, bias, mask and seqlens_k: kernels without them say so") {
    const auto changes = {
        +[](Problem& p) { p.mask_left = -5; },       +[](Problem& p) { p.softcap = 30; },
        +[](Problem& p) { p.has_bias = true; },      +[](Problem& p) { p.has_mask = true; },
        +[](Problem& p) { p.has_seqlens_k = true; },
    };
    for (const auto& change : changes) {
        Problem p = problem(DeviceType::kCuda, DType::kFloat32, 64);
        change(p);
        CHECK(contains(supports("fa2", p, kH200), "it has no "));
        CHECK(supports("naive", p, kH200) == "");
    }
}

TEST_CASE("pages go to the kernel that splits keys, whatever the queries; others say so") {
    Problem p = problem(DeviceType::kCuda, DType::kFloat16, 64, 512);
    p.page_size = 16, p.has_seqlens_k = true;
    for (int64_t seqlen_q : {1, 17, 5000}) {
        p.seqlen_q = seqlen_q;
        for (const DeviceInfo& device : {kA100, kRtx3090, kH200}) {
            CHECK(picked(p, device) == "fa2_cute");
            CHECK(plan(p, device).strategy == Strategy::kSplitKV);
        }
    }
    CHECK(supports("naive", p, kH200) == "it reads no pages (page_table)");
    const std::string on_turing = message<Unsupported>([&] { plan(p, kT4); });
    CHECK(contains(on_turing, "it reads no pages"));
    CHECK(contains(on_turing, "it needs sm_80 or later"));
    p.dtype_q = p.dtype_kv = p.dtype_o = DType::kFloat32;
    CHECK(plan(p, kH200).strategy == Strategy::kSplitKV);
    DeviceInfo empty = kH200;
    empty.built_kernels = 0;
    p.dtype_q = p.dtype_kv = p.dtype_o = DType::kFloat16;
    CHECK(contains(message<CudaError>([&] { plan(p, empty); }), "fa2_cute was built for"));
    p.device = DeviceType::kCpu;
    for (const char* kernel : {"cpu_naive", "cpu_fa1", "cpu_fa2"}) {
        CHECK(supports(kernel, p, laptop()) == "");
    }
}

TEST_CASE("keys and values in fp8 are for the CPU's ladder and for split_kv") {
    Problem p = problem(DeviceType::kCpu, DType::kFloat16, 64);
    p.dtype_kv = DType::kFloat8E4M3;
    for (const char* kernel : {"cpu_naive", "cpu_fa1", "cpu_fa2"}) {
        CHECK(supports(kernel, p, laptop()) == "");
    }
    CHECK(contains(explain(plan(p, laptop()), p, laptop()), "float16 (float8_e4m3fn k and v)"));
    p.device = DeviceType::kCuda;
    for (int64_t page_size : {0, 16}) {
        p.page_size = page_size, p.has_seqlens_k = page_size > 0;
        for (int64_t seqlen_q : {1, 17, 5000}) {
            for (int64_t head_dim : {1, 64, 96, 128, 192, 256}) {
                p.seqlen_q = seqlen_q, p.head_dim = p.head_dim_v = head_dim;
                for (const DeviceInfo& device : {kA100, kRtx3090, kH200}) {
                    const Plan chosen = plan(p, device);
                    CHECK(std::string(chosen.kernel) == "fa2_cute");
                    CHECK(chosen.strategy == Strategy::kSplitKV);
                    CHECK(chosen.tile.head_dim >= head_dim);
                }
            }
        }
    }
    p.page_size = 0;
    CHECK(supports("naive", p, kH200) ==
          "it needs one dtype for q, k, v and out; they have float16, float8_e4m3fn and float16");
    CHECK(contains(message<Unsupported>([&] { plan(p, kT4); }), "it needs sm_80 or later"));
    p.head_dim = p.head_dim_v = 257;
    CHECK(contains(message<Unsupported>([&] { plan(p, kH200); }), "more than its tiles hold"));
}

TEST_CASE("a number of splits is for kernels that split") {
    Problem p = problem(DeviceType::kCuda, DType::kFloat16, 64, 4096);
    CHECK(plan(p, kH200).strategy == Strategy::kSplitQ);
    p.num_splits = 1;
    CHECK(plan(p, kH200).strategy == Strategy::kSplitQ);
    p.num_splits = 4;
    CHECK(plan(p, kH200).strategy == Strategy::kSplitKV);
    CHECK(plan(p, kH200).num_splits == 4);
    CHECK(supports("fa2", p, kH200) == "it does not split the keys (num_splits is 4)");
    p.device = DeviceType::kCpu;
    CHECK_THROWS_AS(plan(p, laptop()), Unsupported);
}

TEST_CASE("sm90 splits no more rows than a grid can merge") {
    Problem p = problem(DeviceType::kCuda, DType::kFloat16, 64, 4096);
    p.batch = 1, p.num_heads = p.num_heads_kv = 1 << 16;
    p.num_splits = 2;
    p.seqlen_q = 1 << 14;
    CHECK(plan(p, kH200, "sm90").strategy == Strategy::kSplitKV);
    p.seqlen_q = 1 << 17;  // a warp a row and 4 of them a block would be 2^31 blocks
    CHECK(contains(supports("sm90", p, kH200), "8589934592 rows to merge; 2^31 - 1 is the limit"));
    p.num_splits = 1;
    CHECK(plan(p, kH200, "sm90").strategy == Strategy::kSplitQ);
}

TEST_CASE("kernels without code for the GPU are passed over; none left is a CudaError") {  // FA-087
    const Problem p = problem(DeviceType::kCuda, DType::kFloat16, 64);
    DeviceInfo device = kH200;
    device.built_kernels = 0;
    int bit = 0;
    for (const KernelFamily* family : registry()) {
        const std::string_view name = family->name;
        if (name != "fa2_cute" && name != "sm90") device.built_kernels |= 1u << bit;
        ++bit;
    }
    CHECK(picked(p, device) == "fa2");
    CHECK(is_built("fa2", device));
    CHECK_FALSE(is_built("sm90", device));
    CHECK_FALSE(is_built("cpu_fa2", device));
    CHECK(is_built("cpu_fa2", laptop()));
    CHECK_FALSE(is_built("fa2", laptop()));
    device.built_kernels = 0;
    const std::string text = message<CudaError>([&] { plan(p, device); });
    CHECK(contains(text, "no code for the GPU's architecture sm_90"));
    CHECK(contains(text, "was built for: "));
}

TEST_CASE("tiles fit the device and cover the head dimension") {  // FA-042
    for (const DeviceInfo& device : {kT4, kA100, kRtx3090, kH200}) {
        for (int64_t head_dim : {1, 8, 33, 64, 80, 96, 128, 160, 192, 200, 256}) {
            for (DType dtype : {DType::kFloat32, DType::kFloat16}) {
                const Problem p = problem(DeviceType::kCuda, dtype, head_dim);
                for (const KernelFamily* family : registry()) {
                    if (!supports(family->name, p, device).empty()) continue;
                    CAPTURE(device.name);
                    CAPTURE(family->name);
                    CAPTURE(head_dim);
                    const Plan chosen = plan(p, device, family->name);
                    CHECK(chosen.tile.block_m > 0);
                    CHECK(chosen.tile.block_n > 0);
                    CHECK(chosen.tile.head_dim >= head_dim);
                }
                CHECK_FALSE(picked(p, device).empty());
            }
        }
    }
}

TEST_CASE("workspace: S x S for naive, none for fa2") {
    const Problem p = problem(DeviceType::kCuda, DType::kFloat16, 64);
    CHECK(plan(p, kH200, "naive").workspace_bytes >= 2 * 8 * 1024 * 1024 * 4);
    CHECK(plan(p, kH200, "fa2").workspace_bytes == 0);
    CHECK(plan(p, kH200, "fa2_cute").workspace_bytes == 0);
}

TEST_CASE("sizes of 0 are planned like any other") {  // FA-016
    for (int64_t Problem::* size :
         {&Problem::batch, &Problem::num_heads, &Problem::seqlen_q, &Problem::seqlen_k}) {
        for (DeviceType type : {DeviceType::kCpu, DeviceType::kCuda}) {
            Problem p = problem(type, DType::kFloat16, 64);
            p.*size = 0;
            p.num_heads_kv = p.num_heads;
            p.mask_right = p.seqlen_k;
            const DeviceInfo device = type == DeviceType::kCpu ? laptop() : kH200;
            for (const KernelInfo& kernel : kernels()) {
                if (kernel.device != type) continue;
                CAPTURE(kernel.name);
                const Plan chosen = plan(p, device, kernel.name);
                CHECK(chosen.workspace_bytes >= 0);
                if (p.is_empty()) CHECK(chosen.workspace_bytes == 0);
            }
        }
    }
}

TEST_CASE("the same question gets the same answer") {
    const Problem p = problem(DeviceType::kCuda, DType::kFloat16, 96);
    CHECK(explain(plan(p, kA100), p, kA100) == explain(plan(p, kA100), p, kA100));
    const std::string text = explain(plan(p, kA100), p, kA100);
    for (const char* part : {"A100", "fa2_cute", "split_q", "workspace", "head_dim 96", "why"}) {
        CHECK(contains(text, part));
    }
}

TEST_CASE("a plan for an unknown kernel does not run") {
    Plan unknown;
    unknown.kernel = "flash9";
    CHECK(contains(message<InvalidArgument>([&] {
                       run(unknown, problem(DeviceType::kCpu, DType::kFloat32, 8), {}, nullptr,
                           nullptr);
                   }),
                   "'flash9'"));
}

TEST_CASE("the registry: names are unique and every kernel says what it teaches") {
    std::set<std::string> names;
    for (const KernelInfo& kernel : kernels()) {
        CHECK(names.insert(kernel.name).second);
        CHECK_FALSE(kernel.lesson.empty());
    }
    for (const char* name :
         {"naive", "fa1", "fa2", "fa2_cute", "sm90", "cpu_naive", "cpu_fa1", "cpu_fa2"}) {
        CHECK(names.count(name) == 1);
    }
}
