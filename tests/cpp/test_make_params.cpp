// Every check on user input, each by the words of its message: argument, value, rule.
#include <fa101/error.h>
#include <fa101/params.h>

#include "overlap.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

using namespace fa101;

namespace {

// One allocation holding q, k, v and out of a (batch, heads, seqlen, head_dim) problem.
struct Arrays {
    std::vector<float> memory = std::vector<float>(1 << 16);
    TensorView q, k, v, out;
    int64_t used = 0;

    Arrays(int64_t batch, int64_t heads, int64_t heads_kv, int64_t seqlen_q, int64_t seqlen_k,
           int64_t head_dim, int64_t head_dim_v) {
        q = dense({batch, heads, seqlen_q, head_dim});
        k = dense({batch, heads_kv, seqlen_k, head_dim});
        v = dense({batch, heads_kv, seqlen_k, head_dim_v});
        out = dense({batch, heads, seqlen_q, head_dim_v});
    }

    TensorView dense(const std::vector<int64_t>& shape) {
        TensorView t;
        t.ndim = static_cast<int>(shape.size());
        int64_t stride = 1;
        for (int i = t.ndim - 1; i >= 0; --i) {
            t.shape[i] = shape[i];
            t.strides[i] = stride;
            stride *= shape[i];
        }
        t.data = memory.data() + used;
        used += (stride + 15) / 16 * 16;
        REQUIRE(used <= static_cast<int64_t>(memory.size()));
        return t;
    }

    Params make(const Options& options = {}, const TensorView* lse = nullptr) const {
        return make_params(q, k, v, out, lse, options);
    }
};

Arrays usual() { return Arrays(2, 4, 2, 5, 7, 8, 8); }

template <class Exception>
std::string message(const Arrays& arrays, const Options& options = {},
                    const TensorView* lse = nullptr) {
    try {
        arrays.make(options, lse);
    } catch (const Exception& error) {
        return error.what();
    }
    return "no error";
}

}  // namespace

TEST_CASE("sizes, strides and the default scale reach Problem and Tensors") {
    const Arrays a(2, 4, 2, 5, 7, 8, 16);
    const Params p = a.make();
    CHECK(p.problem.batch == 2);
    CHECK(p.problem.num_heads == 4);
    CHECK(p.problem.num_heads_kv == 2);
    CHECK(p.problem.seqlen_q == 5);
    CHECK(p.problem.seqlen_k == 7);
    CHECK(p.problem.head_dim == 8);
    CHECK(p.problem.head_dim_v == 16);
    CHECK(p.problem.group_size() == 2);
    CHECK(p.problem.softmax_scale == doctest::Approx(1 / std::sqrt(8.0)));
    CHECK_FALSE(p.problem.has_right_bound());
    CHECK(p.tensors.q_row_stride == 8);
    CHECK(p.tensors.q_head_stride == 40);
    CHECK(p.tensors.v_batch_stride == 2 * 7 * 16);
    CHECK(p.tensors.lse_ptr == nullptr);
}

TEST_CASE("layout bshd only swaps strides") {
    Arrays a = usual();
    Options options;
    options.layout = Layout::kBSHD;
    a.q = a.dense({2, 5, 4, 8}), a.k = a.dense({2, 7, 2, 8});
    a.v = a.dense({2, 7, 2, 8}), a.out = a.dense({2, 5, 4, 8});
    const Params p = a.make(options);
    CHECK(p.problem.num_heads == 4);
    CHECK(p.problem.seqlen_q == 5);
    CHECK(p.tensors.q_head_stride == 8);
    CHECK(p.tensors.q_row_stride == 32);
}

TEST_CASE("the mask is two bounds on the chosen diagonal") {
    Options options;
    options.causal = true;
    CHECK(usual().make(options).problem.mask_right == 0);
    options.align = Align::kBottomRight;
    CHECK(usual().make(options).problem.mask_right == 2);
    options.causal = false;
    CHECK(usual().make(options).problem.mask_right == Problem::kUnbounded);
    CHECK(usual().make(options).problem.mask_left == -Problem::kUnbounded);
    CHECK(usual().make(options).problem.visible_pairs() == 2 * 4 * 5 * 7);
    options.window_left = 3;
    options.window_right = 1;
    CHECK(usual().make(options).problem.mask_left == 2 - 3);
    CHECK(usual().make(options).problem.mask_right == 2 + 1);
    options.causal = true;  // nothing to the right, whatever the window
    CHECK(usual().make(options).problem.mask_right == 2);
    options.window_right = 1'000'000'000'000'000;
    options.window_left = std::numeric_limits<int64_t>::max();
    options.causal = false;
    CHECK(usual().make(options).problem.mask_right == Problem::kUnbounded);
    CHECK(usual().make(options).problem.mask_left == -Problem::kUnbounded);
}

TEST_CASE("visible pairs are counted exactly") {
    for (int64_t seqlen_q : {1, 2, 5, 9}) {
        for (int64_t seqlen_k : {0, 1, 4, 9, 12}) {
            for (int64_t mask_right = -12; mask_right <= 12; ++mask_right) {
                for (int64_t width : {int64_t{0}, int64_t{2}, int64_t{9}, Problem::kUnbounded}) {
                    Problem p;
                    p.batch = 2, p.num_heads = 3;
                    p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
                    p.mask_right = mask_right, p.mask_left = mask_right - width;
                    int64_t count = 0;
                    for (int64_t i = 0; i < seqlen_q; ++i) {
                        for (int64_t j = 0; j < seqlen_k; ++j) {
                            count += i + p.mask_left <= j && j <= i + mask_right;
                        }
                    }
                    CHECK(p.visible_pairs() == 2 * 3 * count);
                }
            }
        }
    }
}

TEST_CASE("128-bit paths are legal only where every row allows them") {
    CHECK(usual().make().problem.aligned16);
    Arrays a = usual();
    a.k.data = static_cast<float*>(a.k.data) + 1;
    CHECK_FALSE(a.make().problem.aligned16);
    Arrays odd(1, 1, 1, 5, 7, 6, 8);
    CHECK_FALSE(odd.make().problem.aligned16);
    Arrays strided = usual();
    strided.q.strides[2] = 9;
    CHECK_FALSE(strided.make().problem.aligned16);
}

TEST_CASE("TMA wants positive strides of 16 bytes below 2^40") {
    CHECK(usual().make().problem.tma);
    for (TensorView Arrays::* input : {&Arrays::q, &Arrays::k, &Arrays::v}) {
        // With this batch stride and start, the latter away from the other arrays.
        const auto legal = [&](int64_t batch_stride, int64_t batch = 2, int64_t start = 1 << 15) {
            Arrays a(batch, 4, 2, 5, 7, 8, 8);
            (a.*input).data = a.memory.data() + start;
            (a.*input).strides[0] = batch_stride;
            return a.make().problem.tma;
        };
        CHECK(legal(400));
        CHECK(legal((int64_t{1} << 38) - 4));
        CHECK_FALSE(legal(int64_t{1} << 38));
        CHECK_FALSE(legal(402));
        CHECK_FALSE(legal(0));
        CHECK_FALSE(legal(-400));
        CHECK(legal(0, 1));  // an axis of one element is never walked
        CHECK_FALSE(legal(400, 2, (1 << 15) + 1));
    }
    Arrays no_keys(2, 4, 2, 5, 0, 8, 8);
    for (int axis : {0, 1, 2}) no_keys.k.strides[axis] = no_keys.v.strides[axis] = 0;
    CHECK(no_keys.make().problem.tma);
    Arrays shifted_out = usual();
    shifted_out.out.data = static_cast<float*>(shifted_out.out.data) + 1;
    CHECK_FALSE(shifted_out.make().problem.tma);
    for (int64_t batch_stride : {400, 402, -400}) {
        Arrays other_out = usual();
        other_out.out.data = other_out.memory.data() + (1 << 15);
        other_out.out.strides[0] = batch_stride;
        CHECK(other_out.make().problem.tma == (batch_stride == 400));
    }
}

TEST_CASE("head counts that do not divide name k, both counts and the rule") {  // FA-055
    for (auto [heads, heads_kv] : {std::pair{3, 2}, {33, 2}, {2, 4}, {4, 0}, {1, 3}}) {
        const Arrays a(1, heads, heads_kv, 3, 3, 8, 8);
        CHECK(message<InvalidArgument>(a) ==
              "k has " + std::to_string(heads_kv) + " heads and q has " + std::to_string(heads) +
                  "; the heads of q must be a multiple of the heads of k and v");
    }
    Arrays a = usual();
    a.v = a.dense({2, 4, 7, 8});
    CHECK(message<InvalidArgument>(a) == "v has heads 4 but k has 2; they must be equal");
}

TEST_CASE("mismatched sizes name the argument and both values") {
    Arrays a = usual();
    a.k = a.dense({3, 2, 7, 8});
    CHECK(message<InvalidArgument>(a) == "k has batch 3 but q has 2; they must be equal");
    a = usual();
    a.k = a.dense({2, 2, 7, 4});
    CHECK(message<InvalidArgument>(a) == "k has head_dim 4 but q has 8; they must be equal");
    a = usual();
    a.v = a.dense({2, 2, 6, 8});
    CHECK(message<InvalidArgument>(a) == "v has seqlen 6 but k has 7; they must be equal");
    a = usual();
    a.out = a.dense({2, 4, 5, 9});
    CHECK(message<InvalidArgument>(a) == "out has head_dim 9 but v has 8; they must be equal");
    a = usual();
    a.q.ndim = 3;
    CHECK(message<InvalidArgument>(a) ==
          "q has 3 dimensions; it must have 4: (batch, heads, seqlen, head_dim) for layout bhsd");
    CHECK(message<InvalidArgument>(Arrays(1, 1, 1, 2, 2, 0, 4)) ==
          "q has head_dim 0; it must be at least 1");
}

TEST_CASE("dtypes and devices must agree") {  // FA-065, FA-003
    Arrays a = usual();
    a.v.dtype = DType::kBFloat16;
    CHECK(message<InvalidType>(a) ==
          "v has dtype bfloat16 but q has dtype float32; they must be equal");
    a = usual();
    a.k.device = {DeviceType::kCuda, 1};
    CHECK(message<InvalidArgument>(a) ==
          "k is on cuda:1 but q is on cpu; all tensors must be on one device");
}

TEST_CASE("fp8 is for k and v, beside 16-bit q and out; only it has a descale") {
    const DType fp8 = DType::kFloat8E4M3;
    const auto usual = [&] {
        Arrays a(2, 4, 2, 5, 7, 8, 8);
        a.q.dtype = a.out.dtype = DType::kFloat16;
        a.k.dtype = a.v.dtype = fp8;
        return a;
    };
    Arrays a = usual();
    const TensorView by_head = a.dense({2}), by_entry = a.dense({2, 2});
    Options options;
    options.k_descale = &by_head, options.v_descale = &by_entry;
    const Params params = a.make(options);
    CHECK(params.problem.dtype_kv == fp8);
    CHECK(params.tensors.k_descale.ptr == by_head.data);
    CHECK(params.tensors.k_descale.batch_stride == 0);
    CHECK(params.tensors.k_descale.head_stride == 1);
    CHECK(params.tensors.v_descale.batch_stride == 2);
    CHECK(params.tensors.v_descale.head_stride == 1);
    CHECK(a.make().tensors.k_descale.ptr == nullptr);
    CHECK(!a.make().problem.aligned16);  // 8 columns are half a vector

    a.q.dtype = DType::kFloat32;
    CHECK(message<InvalidType>(a) ==
          "q has dtype float32 and k float8_e4m3fn; with that it must be float16 or bfloat16");
    a = usual();
    a.q.dtype = fp8;
    CHECK(message<InvalidType>(a) ==
          "q has dtype float8_e4m3fn; it must be float32, float16 or bfloat16");
    a = usual();
    a.v.dtype = DType::kFloat16;
    CHECK(message<InvalidType>(a) ==
          "v has dtype float16 but k has dtype float8_e4m3fn; they must be equal");
    a = usual();
    a.out.dtype = fp8;
    CHECK(message<InvalidType>(a) ==
          "out has dtype float8_e4m3fn but q has dtype float16; they must be equal");
    a = usual();
    a.k.dtype = a.v.dtype = DType::kFloat16;
    CHECK(message<InvalidArgument>(a, options) ==
          "k_descale is given but k has dtype float16; only float8_e4m3fn has a descale");

    const auto refusal = [&](auto change) {
        Arrays arrays = usual();
        TensorView scales = arrays.dense({2, 2});
        change(scales);
        Options with;
        with.v_descale = &scales;
        return message<Error>(arrays, with);
    };
    CHECK(refusal([](TensorView& t) { t.dtype = DType::kFloat16; }) ==
          "v_descale has dtype float16; it must be float32");
    CHECK(refusal([](TensorView& t) { t.device = {DeviceType::kCuda, 0}; }) ==
          "v_descale is on cuda:0 but q is on cpu; all tensors must be on one device");
    const std::string rule =
        "; it must have one entry for each head of v, (2,), or for each batch entry and head, (2, 2)";
    CHECK(refusal([](TensorView& t) { t.shape[1] = 4; }) == "v_descale has shape (2, 4)" + rule);
    CHECK(refusal([](TensorView& t) { t.ndim = 1, t.shape[0] = 4; }) ==
          "v_descale has shape (4,)" + rule);
    CHECK(refusal([](TensorView& t) { t.ndim = 0; }).find("v_descale has shape (") == 0);
    CHECK(refusal([](TensorView& t) { t.data = nullptr; }) ==
          "v_descale has no data (a null pointer)");
    a = usual();
    TensorView inside = a.out;
    inside.ndim = 1, inside.shape[0] = 2, inside.dtype = DType::kFloat32;
    options = {};
    options.k_descale = &inside;
    CHECK(message<InvalidArgument>(a, options) ==
          "out overlaps k_descale in memory; kernels write while they read");
}

TEST_CASE("the last axis must be contiguous") {
    Arrays a = usual();
    a.q.strides[3] = 2;
    CHECK(message<InvalidArgument>(a).find("the last axis (head_dim) must be contiguous") !=
          std::string::npos);
}

TEST_CASE("outputs that cannot hold the result are refused") {  // FA-054, FA-075
    Arrays a = usual();
    a.out.read_only = true;
    CHECK(message<InvalidArgument>(a) == "out is read-only; this call would write into it");
    a = usual();
    a.out.strides[0] = 0;
    CHECK(message<InvalidArgument>(a).find("several elements share one address") !=
          std::string::npos);
    a = usual();
    a.out.strides[2] = 7;
    CHECK(message<InvalidArgument>(a).find("several elements share one address") !=
          std::string::npos);
    a = usual();
    a.out.data = a.q.data;
    CHECK(message<InvalidArgument>(a) == "out overlaps q in memory; kernels write while they read");
    a = usual();
    a.out.data = static_cast<float*>(a.k.data) - 4;
    CHECK(message<InvalidArgument>(a).find("out overlaps") != std::string::npos);
}

TEST_CASE("arrays may interleave in one buffer") {
    // q, k, v and out as slices of one (batch, seqlen, 4, heads, head_dim) buffer, as a packed
    // projection gives them; then one element too close.
    std::vector<float> buffer(2 * 5 * 4 * 2 * 8);
    Arrays a(2, 2, 2, 5, 5, 8, 8);
    TensorView* const slices[] = {&a.q, &a.k, &a.v, &a.out};
    for (int i = 0; i < 4; ++i) {
        slices[i]->data = buffer.data() + i * 16;
        slices[i]->strides[0] = 5 * 64, slices[i]->strides[1] = 8, slices[i]->strides[2] = 64;
    }
    CHECK(message<InvalidArgument>(a) == "no error");
    a.out.data = static_cast<float*>(a.out.data) - 1;
    CHECK(message<InvalidArgument>(a) == "out overlaps v in memory; kernels write while they read");
}

TEST_CASE("sharing memory is decided exactly") {
    // Against a list of all addresses, over strides that nest, fold and run backwards.
    std::vector<float> buffer(512);
    const auto addresses = [&](const TensorView& t) {
        std::vector<int64_t> all;
        for (int64_t i = 0; i < t.shape[0]; ++i) {
            for (int64_t j = 0; j < t.shape[1]; ++j) {
                all.push_back(static_cast<float*>(t.data) - buffer.data() + i * t.strides[0] +
                              j * t.strides[1]);
            }
        }
        std::sort(all.begin(), all.end());
        return all;
    };
    std::mt19937 random(1);
    const auto draw = [&](int low, int high) {
        return std::uniform_int_distribution<int>(low, high)(random);
    };
    int shared = 0, folded = 0;
    for (int repeat = 0; repeat < 20000; ++repeat) {
        TensorView views[2];
        for (TensorView& t : views) {
            t.ndim = 2;
            t.data = buffer.data() + 256 + draw(-30, 30);
            for (int i = 0; i < 2; ++i) t.shape[i] = draw(1, 4), t.strides[i] = draw(-20, 20);
        }
        const std::vector<int64_t> a = addresses(views[0]), b = addresses(views[1]);
        std::vector<int64_t> both;
        std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
        REQUIRE(share_memory(views[0], views[1]) == !both.empty());
        const bool folds = std::adjacent_find(a.begin(), a.end()) != a.end();
        REQUIRE(shares_memory_with_itself(views[0]) == folds);
        shared += !both.empty(), folded += folds;
    }
    CHECK(shared > 1000);
    CHECK(folded > 1000);
}

TEST_CASE("expanded and negative strides are fine for inputs") {
    Arrays a = usual();
    a.k.strides[0] = 0;
    a.q.data = static_cast<float*>(a.q.data) + 4 * 8;
    a.q.strides[2] = -8;
    const Params p = a.make();
    CHECK(p.tensors.k_batch_stride == 0);
    CHECK(p.tensors.q_row_stride == -8);
}

TEST_CASE("lse must be a contiguous float32 (batch, heads, seqlen_q)") {
    Arrays a = usual();
    TensorView lse = a.dense({2, 4, 5});
    CHECK(a.make({}, &lse).tensors.lse_ptr == lse.data);
    lse.dtype = DType::kFloat16;
    CHECK(message<InvalidType>(a, {}, &lse) == "lse has dtype float16; it must be float32");
    lse = a.dense({2, 5, 4});
    CHECK(message<InvalidArgument>(a, {}, &lse).find("= (2, 4, 5)") != std::string::npos);
    lse = a.dense({2, 4, 5});
    lse.data = a.out.data;
    CHECK(message<InvalidArgument>(a, {}, &lse) == "lse overlaps out in memory");
}

TEST_CASE("problems are equal where every field is") {
    // A new field belongs into operator== and here.
    static_assert(sizeof(Problem) == 128);
    const Problem base;
    CHECK(base == Problem{});
    const auto differs = [&](auto Problem::* field, auto value) {
        Problem other;
        REQUIRE(other.*field != value);
        other.*field = value;
        return !(other == base) && other == other;
    };
    for (auto field :
         {&Problem::batch, &Problem::num_heads, &Problem::num_heads_kv, &Problem::seqlen_q,
          &Problem::seqlen_k, &Problem::head_dim, &Problem::head_dim_v, &Problem::mask_left,
          &Problem::mask_right, &Problem::seqlen_new, &Problem::page_size, &Problem::num_splits}) {
        CHECK(differs(field, int64_t{7}));
    }
    for (auto field : {&Problem::has_bias, &Problem::has_mask, &Problem::has_seqlens_k,
                       &Problem::diagonal_follows_seqlens_k, &Problem::aligned16, &Problem::tma}) {
        CHECK(differs(field, true));
    }
    for (auto field :
         {&Problem::dtype_q, &Problem::dtype_kv, &Problem::dtype_o, &Problem::dtype_bias}) {
        CHECK(differs(field, DType::kFloat16));
    }
    CHECK(differs(&Problem::device, DeviceType::kCuda));
    CHECK(differs(&Problem::softmax_scale, 0.5f));
    CHECK(differs(&Problem::softcap, 0.5f));
}

TEST_CASE("scales: 0, negative and tiny are legal, non-finite is not") {
    Options options;
    for (float scale : {0.0f, -1.5f, 1e-38f}) {
        options.softmax_scale = scale;
        CHECK(usual().make(options).problem.softmax_scale == scale);
    }
    options.softmax_scale = std::numeric_limits<float>::infinity();
    CHECK(message<InvalidArgument>(usual(), options) == "softmax_scale is inf; it must be finite");
}

TEST_CASE("empty problems pass, with nothing behind their pointers") {  // FA-016
    for (auto [batch, heads, seqlen_q, seqlen_k] :
         {std::array{0, 2, 5, 7}, {2, 0, 5, 7}, {2, 2, 0, 7}, {0, 0, 0, 0}}) {
        Arrays a(batch, heads, heads, seqlen_q, seqlen_k, 16, 16);
        a.q.data = a.out.data = nullptr;
        CHECK(a.make().problem.is_empty());
    }
    Arrays no_keys(2, 2, 2, 5, 0, 16, 16);
    no_keys.k.data = no_keys.v.data = nullptr;
    CHECK_FALSE(no_keys.make().problem.is_empty());
    Arrays null = usual();
    null.q.data = nullptr;
    CHECK(message<InvalidArgument>(null) == "q has no data (a null pointer)");
}
