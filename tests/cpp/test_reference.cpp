// The oracle and its tools, checked by hand: nothing else checks them.
#include <fa101/params.h>

#include "testing/compare.h"
#include "testing/element.h"
#include "testing/host_tensor.h"
#include "testing/reference.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace {

using fa101::Align;
using fa101::DType;
using fa101::Options;
using fa101::Params;
using fa101::testing::Comparison;
using fa101::testing::HostTensor;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Result {
    std::vector<double> o, lse;
};

// q, k and v as they are; o is never written by the oracle.
Result reference(HostTensor& q, HostTensor& k, HostTensor& v, const Options& options = {},
                 int64_t row_step = 1) {
    HostTensor o(q.dtype(), {q.shape()[0], q.shape()[1], q.shape()[2], v.shape()[3]});
    const Params params =
        fa101::make_params(q.view(), k.view(), v.view(), o.view(), nullptr, options);
    const int64_t rows =
        q.shape()[0] * q.shape()[1] * fa101::testing::num_rows(params.problem, row_step);
    Result result{std::vector<double>(rows * v.shape()[3]), std::vector<double>(rows)};
    fa101::testing::reference_attention(params.problem, params.tensors, result.o.data(),
                                        result.lse.data(), 2, row_step);
    return result;
}

HostTensor zeros(std::vector<int64_t> shape) {
    HostTensor t(DType::kFloat32, std::move(shape));
    t.fill([](int64_t) { return 0.0f; });
    return t;
}

HostTensor normal(std::vector<int64_t> shape, uint64_t seed) {
    HostTensor t(DType::kFloat32, std::move(shape));
    t.fill_normal(seed);
    return t;
}

Options causal(Align align) {
    Options options;
    options.causal = true;
    options.align = align;
    return options;
}

}  // namespace

TEST_CASE("two keys, by hand") {
    // s = scale * (1, -1) * q, so p = softmax(1, -1)
    HostTensor q = zeros({1, 1, 1, 2}), k = zeros({1, 1, 2, 2}), v = zeros({1, 1, 2, 1});
    q.set({0, 0, 0, 0}, 2.0f);
    k.set({0, 0, 0, 0}, 1.0f);
    k.set({0, 0, 1, 0}, -1.0f);
    v.set({0, 0, 0, 0}, 10.0f);
    v.set({0, 0, 1, 0}, 20.0f);
    Options options;
    options.softmax_scale = 0.5f;
    const Result r = reference(q, k, v, options);
    const double p = std::exp(1.0) / (std::exp(1.0) + std::exp(-1.0));
    CHECK(r.o[0] == doctest::Approx(10 * p + 20 * (1 - p)).epsilon(1e-15));
    CHECK(r.lse[0] == doctest::Approx(std::log(std::exp(1.0) + std::exp(-1.0))).epsilon(1e-15));

    SUBCASE("a negative scale swaps the keys") {
        options.softmax_scale = -0.5f;
        CHECK(reference(q, k, v, options).o[0] ==
              doctest::Approx(10 * (1 - p) + 20 * p).epsilon(1e-15));
    }
    SUBCASE("scale 0 is the mean") {
        options.softmax_scale = 0.0f;
        CHECK(reference(q, k, v, options).o[0] == 15.0);
    }
    SUBCASE("no scale is 1 / sqrt(head_dim)") {
        const Result unscaled = reference(q, k, v);
        CHECK(unscaled.lse[0] ==
              doctest::Approx(std::log(2 * std::cosh(std::sqrt(2.0)))).epsilon(1e-7));
    }
}

TEST_CASE("causal with more queries than keys: rows that see no key (FA-017)") {
    HostTensor q = zeros({1, 1, 5, 8}), k = normal({1, 1, 2, 8}, 1), v = zeros({1, 1, 2, 8});
    v.fill([](int64_t i) { return i < 8 ? 1.0f : 2.0f; });
    const Result r = reference(q, k, v, causal(Align::kBottomRight));
    const double o[] = {0, 0, 0, 1, 1.5};
    const double inf = std::numeric_limits<double>::infinity();
    const double lse[] = {-inf, -inf, -inf, 0, std::log(2.0)};
    for (int i = 0; i < 5; ++i) {
        for (int d = 0; d < 8; ++d) CHECK(r.o[8 * i + d] == o[i]);
        CHECK((r.lse[i] == lse[i] || std::fabs(r.lse[i] - lse[i]) < 1e-15));
    }
}

TEST_CASE("causal with fewer queries than keys: both corners (FA-023)") {
    HostTensor q = zeros({1, 1, 2, 8}), k = normal({1, 1, 5, 8}, 1), v = zeros({1, 1, 5, 8});
    v.fill([](int64_t i) { return static_cast<float>(i / 8 + 1); });
    const Result bottom = reference(q, k, v, causal(Align::kBottomRight));
    CHECK(bottom.o[0] == 2.5);
    CHECK(bottom.o[8] == 3.0);
    CHECK(bottom.lse[0] == doctest::Approx(std::log(4.0)));
    CHECK(bottom.lse[1] == doctest::Approx(std::log(5.0)));
    const Result top = reference(q, k, v, causal(Align::kTopLeft));
    CHECK(top.o[0] == 1.0);
    CHECK(top.o[8] == 1.5);
}

TEST_CASE("query head h reads KV head h / group (FA-077)") {
    for (const auto& [heads, heads_kv] :
         {std::pair<int64_t, int64_t>{4, 2}, {6, 2}, {8, 1}, {12, 4}}) {
        HostTensor q = normal({2, heads, 3, 4}, 1), k = zeros({2, heads_kv, 5, 4});
        HostTensor v = zeros({2, heads_kv, 5, 4});
        v.fill([kv = heads_kv](int64_t i) { return static_cast<float>(i / 20 % kv); });
        const Result r = reference(q, k, v);
        for (int64_t i = 0; i < q.numel(); ++i) {
            CHECK(r.o[i] == static_cast<double>(i / 12 % heads / (heads / heads_kv)));
        }
    }
}

TEST_CASE("no keys at all") {
    HostTensor q = normal({1, 1, 2, 4}, 1), k = zeros({1, 1, 0, 4}), v = zeros({1, 1, 0, 3});
    const Result r = reference(q, k, v);
    for (double x : r.o) CHECK(x == 0.0);
    for (double x : r.lse) CHECK(x == -std::numeric_limits<double>::infinity());
}

TEST_CASE("what a row sees propagates; what it does not see has no effect") {
    HostTensor q = normal({1, 1, 4, 4}, 1), k = normal({1, 1, 4, 4}, 2),
               v = normal({1, 1, 4, 4}, 3);
    const Result clean = reference(q, k, v, causal(Align::kTopLeft));
    SUBCASE("NaN in v") { v.set({0, 0, 2, 1}, kNan); }
    SUBCASE("inf in v") { v.set({0, 0, 2, 1}, kInf); }
    SUBCASE("NaN in k") { k.set({0, 0, 2, 1}, kNan); }
    const Result r = reference(q, k, v, causal(Align::kTopLeft));
    for (int i = 0; i < 2; ++i) {  // rows 0 and 1 do not see key 2
        for (int d = 0; d < 4; ++d) CHECK(r.o[4 * i + d] == clean.o[4 * i + d]);
    }
    CHECK_FALSE(std::isfinite(r.o[4 * 2 + 1]));
    CHECK_FALSE(std::isfinite(r.o[4 * 3 + 1]));
}

TEST_CASE("logits that are all -inf: O = 0, lse = -inf, as where no key is seen") {
    HostTensor q = zeros({1, 1, 1, 1}), k = zeros({1, 1, 3, 1}), v = normal({1, 1, 3, 1}, 3);
    q.fill([](int64_t) { return 1.0f; });
    k.fill([](int64_t) { return -kInf; });
    const Result r = reference(q, k, v);
    CHECK(r.o[0] == 0);
    CHECK(r.lse[0] == -std::numeric_limits<double>::infinity());
}

TEST_CASE("strides, dtypes and skipped rows change nothing") {
    const std::vector<int64_t> shape = {2, 3, 7, 5};
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        HostTensor q(dtype, shape), k(dtype, shape), v(dtype, shape);
        // (batch, seqlen, heads, dim) memory with padding; rows back to front; one head for all
        HostTensor q2(dtype, shape, {7 * 3 * 6 + 2, 6, 18, 1}, 3);
        HostTensor k2(dtype, shape, {3 * 7 * 5, 7 * 5, -5, 1});
        HostTensor v2(dtype, shape, {7 * 5, 0, 5, 1});
        q.fill_normal(1), q2.fill_normal(1);
        k.fill_normal(2), k2.fill_normal(2);
        v2.fill_normal(3);
        v.fill([&](int64_t i) { return v2.at({i / 105, i / 35 % 3, i / 5 % 7, i % 5}); });
        const Result plain = reference(q, k, v), strided = reference(q2, k2, v2);
        CHECK(plain.o == strided.o);
        CHECK(plain.lse == strided.lse);
        CHECK(q2.padding_is_intact());

        const Result some = reference(q, k, v, {}, 3);  // rows 0, 3 and 6 of 7
        for (int64_t head = 0; head < 6; ++head) {
            for (int64_t row = 0; row < 3; ++row) {
                CHECK(some.lse[3 * head + row] == plain.lse[7 * head + 3 * row]);
                CHECK(some.o[(3 * head + row) * 5 + 4] == plain.o[(7 * head + 3 * row) * 5 + 4]);
            }
        }
    }
}

TEST_CASE("fp16 and bf16") {
    using namespace fa101::testing;
    CHECK(float_to_fp16(1.0f) == 0x3c00);
    CHECK(float_to_fp16(-2.0f) == 0xc000);
    CHECK(float_to_fp16(65504.0f) == 0x7bff);
    CHECK(float_to_fp16(65519.9f) == 0x7bff);
    CHECK(float_to_fp16(65520.0f) == 0x7c00);               // half-way: inf
    CHECK(float_to_fp16(1.0f + 1.0f / 2048) == 0x3c00);     // a tie, to even
    CHECK(float_to_fp16(1.0f + 3.0f / 2048) == 0x3c02);     // a tie, to even
    CHECK(float_to_fp16(std::ldexp(1.0f, -24)) == 0x0001);  // the smallest subnormal
    CHECK(float_to_fp16(std::ldexp(1.0f, -25)) == 0x0000);
    CHECK(float_to_fp16(-kInf) == 0xfc00);
    CHECK(float_to_bf16(1.0f) == 0x3f80);
    CHECK(float_to_bf16(1.0f + 1.0f / 256) == 0x3f80);  // a tie, to even
    CHECK(float_to_bf16(1.0f + 3.0f / 256) == 0x3f82);  // a tie, to even
    CHECK(float_to_bf16(std::numeric_limits<float>::max()) == 0x7f80);
    CHECK(std::isnan(bf16_to_float(float_to_bf16(kNan))));
    CHECK(std::isnan(fp16_to_float(float_to_fp16(kNan))));
    int wrong = 0;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {  // every value survives the round trip
        const auto half = static_cast<uint16_t>(bits);
        const float a = fp16_to_float(half), b = bf16_to_float(half);
        wrong += !std::isnan(a) && float_to_fp16(a) != half;
        wrong += !std::isnan(b) && float_to_bf16(b) != half;
    }
    CHECK(wrong == 0);
}

TEST_CASE("fp8: codes by hand, and what a descale makes of them") {
    using namespace fa101::testing;
    CHECK(e4m3_to_float(0x01) == std::ldexp(1.0f, -9));  // the smallest subnormal
    CHECK(e4m3_to_float(0x07) == 7 * std::ldexp(1.0f, -9));
    CHECK(e4m3_to_float(0x08) == std::ldexp(1.0f, -6));
    CHECK(e4m3_to_float(0x38) == 1.0f);
    CHECK(e4m3_to_float(0xb9) == -1.125f);
    CHECK(e4m3_to_float(0x7e) == 448.0f);
    CHECK(std::isnan(e4m3_to_float(0x7f)));
    CHECK(std::isnan(e4m3_to_float(0xff)));
    CHECK(float_to_e4m3(1.0625f) == 0x38);  // ties, to even
    CHECK(float_to_e4m3(1.1875f) == 0x3a);
    CHECK(float_to_e4m3(1000.0f) == 0x7e);

    // By batch entry and head, powers of two: the same numbers in float16.
    const std::vector<int64_t> shape = {2, 2, 5, 4};
    HostTensor q(DType::kFloat16, {2, 4, 3, 4}), k(DType::kFloat8E4M3, shape);
    HostTensor v(DType::kFloat8E4M3, shape), k16(DType::kFloat16, shape), v16 = k16;
    HostTensor k_descale(DType::kFloat32, {2, 2}), v_descale(DType::kFloat32, {2});
    q.fill_normal(1), k.fill_normal(2), v.fill_normal(3);
    k_descale.fill([](int64_t i) { return std::ldexp(1.0f, static_cast<int>(i) - 2); });
    v_descale.fill([](int64_t i) { return i == 0 ? 4.0f : 0.5f; });
    k16.fill([&](int64_t i) {
        return k.at({i / 40, i / 20 % 2, i / 4 % 5, i % 4}) * k_descale.at({i / 40, i / 20 % 2});
    });
    v16.fill([&](int64_t i) {
        return v.at({i / 40, i / 20 % 2, i / 4 % 5, i % 4}) * v_descale.at({i / 20 % 2});
    });
    const auto k_view = k_descale.view(), v_view = v_descale.view();
    Options options;
    options.k_descale = &k_view, options.v_descale = &v_view;
    const Result scaled = reference(q, k, v, options), plain = reference(q, k16, v16);
    CHECK(scaled.o == plain.o);
    CHECK(scaled.lse == plain.lse);
}

TEST_CASE("a comparison finds the worst place") {
    HostTensor actual(DType::kFloat32, {2, 3, 4, 5}, {60, 1 * 20, -5, 1});
    actual.fill_normal(1);
    std::vector<double> expected;
    for (int64_t i = 0; i < 120; ++i) {
        expected.push_back(actual.at({i / 60, i / 20 % 3, i / 5 % 4, i % 5}));
    }
    const auto compare = [&] {
        return fa101::testing::compare(actual.data(), DType::kFloat32, {2, 3, 4, 5},
                                       {60, 20, -5, 1}, expected.data());
    };
    CHECK(compare().max_error == 0);
    CHECK(compare().passed(0));
    const int64_t at = 60 + 2 * 20 + 3 * 5 + 4;  // (1, 2, 3, 4)
    const fa101::testing::Shape4 place = {1, 2, 3, 4};

    SUBCASE("too large and too small count alike") {
        expected[0] += 0.25;
        for (double off : {0.5, -0.5}) {
            expected[at] = actual.at({1, 2, 3, 4}) + off;
            const Comparison c = compare();
            CHECK(c.worst == place);
            CHECK(c.max_error == doctest::Approx(0.5));
            CHECK(c.actual == actual.at({1, 2, 3, 4}));
            CHECK(c.expected == expected[at]);
            CHECK_FALSE(c.passed(0.4));
            CHECK(c.passed(0.6));
        }
    }
    SUBCASE("a NaN that should not be there") {
        actual.set({1, 2, 3, 4}, kNan);
        expected[0] += 100;  // a larger number does not hide it
        const Comparison c = compare();
        CHECK(c.worst == place);
        CHECK_FALSE(c.passed(1e30));
        CHECK_FALSE(c.passed(std::numeric_limits<double>::infinity()));
        CHECK(c.describe().find("(1, 2, 3, 4): got nan") != std::string::npos);
    }
    SUBCASE("a NaN that should be there") {
        expected[at] = kNan;
        CHECK_FALSE(compare().passed(1e30));
        actual.set({1, 2, 3, 4}, kNan);
        CHECK(compare().passed(0));
    }
    SUBCASE("infinities have a sign") {
        expected[at] = -kInf;
        CHECK_FALSE(compare().passed(1e30));
        actual.set({1, 2, 3, 4}, kInf);
        CHECK_FALSE(compare().passed(1e30));
        actual.set({1, 2, 3, 4}, -kInf);
        CHECK(compare().passed(0));
    }
}

TEST_CASE("the tolerance accepts rounding and refuses a missing result") {
    HostTensor q = normal({1, 2, 64, 32}, 1), k = normal({1, 2, 64, 32}, 2);
    HostTensor v = normal({1, 2, 64, 32}, 3);
    const Result r = reference(q, k, v);
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        fa101::Problem problem;
        problem.seqlen_k = 64, problem.head_dim = 32, problem.dtype_o = dtype;
        HostTensor rounded(dtype, {1, 2, 64, 32});
        rounded.fill([&](int64_t i) { return static_cast<float>(r.o[i]); });
        const auto compare = [&] {
            return fa101::testing::compare(rounded.data(), dtype, {1, 2, 64, 32},
                                           {4096, 2048, 32, 1}, r.o.data());
        };
        const double tolerance = fa101::testing::output_tolerance(problem, compare().max_expected);
        CHECK(compare().passed(tolerance));
        const double scale = 1 + 64 * fa101::testing::roundoff_of(dtype);
        rounded.fill([&](int64_t i) { return static_cast<float>(scale * r.o[i]); });
        CHECK_FALSE(compare().passed(tolerance));
        rounded.fill([](int64_t) { return 0.0f; });
        CHECK_FALSE(compare().passed(tolerance));
    }
}

TEST_CASE("host tensors start as NaN and notice stray writes") {
    HostTensor t(DType::kFloat16, {2, 3}, {8, 1});
    CHECK(std::isnan(t.at({1, 2})));
    t.fill([](int64_t i) { return static_cast<float>(i); });
    CHECK(t.at({1, 2}) == 5.0f);
    CHECK(t.padding_is_intact());
    fa101::testing::store_element(t.data(), DType::kFloat16, 3, 1.0f);  // between the rows
    CHECK_FALSE(t.padding_is_intact());
}

TEST_CASE("random values are normal, and each seed has its own") {
    const int n = 100000;
    double sum = 0, squares = 0;
    int negative = 0, equal = 0;
    for (int i = 0; i < n; ++i) {
        const double x = fa101::testing::normal_value(7, i);
        sum += x, squares += x * x;
        negative += x < 0;
        equal += fa101::testing::normal_value(8, i) == fa101::testing::normal_value(7, i);
    }
    CHECK(std::fabs(sum / n) < 0.02);
    CHECK(std::fabs(squares / n - 1) < 0.02);
    CHECK(std::abs(negative - n / 2) < 1000);
    CHECK(equal < 10);
}
