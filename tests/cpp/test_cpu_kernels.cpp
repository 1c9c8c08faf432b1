// The CPU ladder against the float64 oracle: every rung, every SIMD level this machine has, every
// dtype; odd shapes and strides, what may not be seen, what may not be touched; window, softcap,
// bias, mask and seqlens_k alone and together.
#include <fa101/device_info.h>
#include <fa101/params.h>
#include <fa101/plan.h>

#include "common/mask.h"
#include "cpu/cpu_families.h"
#include "cpu/parallel.h"
#include "testing/compare.h"
#include "testing/element.h"
#include "testing/host_tensor.h"
#include "testing/reference.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace fa101;
using testing::HostTensor;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

struct Rung {
    const char* name;
    void (*run)(const SimdKernels&, const Plan&, const Problem&, const Tensors&, void*);
};
constexpr Rung kRungs[] = {
    {"cpu_naive", run_cpu_naive}, {"cpu_fa1", run_cpu_fa1}, {"cpu_fa2", run_cpu_fa2}};

std::vector<SimdLevel> simd_levels() {
    std::vector<SimdLevel> levels;
    for (SimdLevel level : {SimdLevel::kPortable, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
        if (level <= cpu_simd_level()) levels.push_back(level);
    }
    return levels;
}

// Runs one rung at one level in a workspace of exactly the planned size, full of NaN.
void run_rung(const Rung& rung, SimdLevel level, const Params& params, int num_threads = 2) {
    DeviceInfo device;
    device.simd = level;
    device.num_threads = num_threads;
    const Plan plan = fa101::plan(params.problem, device, rung.name);
    const size_t bytes = static_cast<size_t>(plan.workspace_bytes), guard = 256;
    std::vector<unsigned char> workspace(bytes + guard, 0xff);
    rung.run(simd_kernels(level), plan, params.problem, params.tensors, workspace.data());
    for (size_t i = bytes; i < workspace.size(); ++i) REQUIRE(workspace[i] == 0xff);
}

// A bool array, for a mask: a pattern without a period that hides about two keys of five.
struct BoolTensor {
    std::vector<int64_t> shape, strides;
    std::vector<uint8_t> bytes;

    explicit BoolTensor(std::vector<int64_t> shape_in)
        : BoolTensor(shape_in, testing::contiguous_strides(shape_in)) {}
    BoolTensor(std::vector<int64_t> shape_in, std::vector<int64_t> strides_in)
        : shape(std::move(shape_in)), strides(std::move(strides_in)) {
        int64_t last = 0;
        for (size_t i = 0; i < shape.size(); ++i) {
            last += std::max<int64_t>(shape[i] - 1, 0) * strides[i];
        }
        for (int64_t i = 0; i <= last; ++i) {
            bytes.push_back(testing::normal_value(9, static_cast<uint64_t>(i)) > -0.25f);
        }
    }

    TensorView view() {
        TensorView t;
        t.data = bytes.data();
        t.dtype = DType::kBool;
        t.ndim = static_cast<int>(shape.size());
        for (int i = 0; i < t.ndim; ++i) t.shape[i] = shape[i], t.strides[i] = strides[i];
        return t;
    }
};

// One question: the inputs, and how the output lies in memory.
struct Case {
    HostTensor q, k, v, o;
    std::optional<HostTensor> bias;
    std::optional<BoolTensor> mask;
    std::vector<int32_t> seqlens_k;
    Options options;

    Case(DType dtype, int64_t batch, int64_t heads, int64_t heads_kv, int64_t seqlen_q,
         int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v)
        : Case(HostTensor(dtype, {batch, heads, seqlen_q, head_dim}),
               HostTensor(dtype, {batch, heads_kv, seqlen_k, head_dim}),
               HostTensor(dtype, {batch, heads_kv, seqlen_k, head_dim_v}),
               HostTensor(dtype, {batch, heads, seqlen_q, head_dim_v})) {}

    Case(HostTensor q_in, HostTensor k_in, HostTensor v_in, HostTensor o_in)
        : q(std::move(q_in)), k(std::move(k_in)), v(std::move(v_in)), o(std::move(o_in)) {
        q.fill_normal(1);
        k.fill_normal(2);
        v.fill_normal(3);
    }

    Params params(TensorView* lse) {
        TensorView bias_view, mask_view, seqlens_view;
        Options all = options;
        if (bias) bias_view = bias->view(), all.bias = &bias_view;
        if (mask) mask_view = mask->view(), all.mask = &mask_view;
        if (!seqlens_k.empty()) {
            seqlens_view.data = seqlens_k.data();
            seqlens_view.dtype = DType::kInt32;
            seqlens_view.ndim = 1;
            seqlens_view.shape[0] = static_cast<int64_t>(seqlens_k.size());
            seqlens_view.strides[0] = 1;
            all.seqlens_k = &seqlens_view;
        }
        return make_params(q.view(), k.view(), v.view(), o.view(), lse, all);
    }

    // All rungs at all levels give the oracle's O and lse, and write nothing else.
    void check(double tolerance_factor = 1) {
        const DType dtype = q.dtype();
        const int64_t batch = o.shape()[0], heads = o.shape()[1], rows = o.shape()[2],
                      dv = o.shape()[3];
        std::vector<double> expected_o(batch * heads * rows * dv),
            expected_lse(batch * heads * rows);
        HostTensor lse(DType::kFloat32, {batch, heads, rows});
        TensorView lse_view = lse.view();
        const Params params = this->params(&lse_view);
        testing::reference_attention(params.problem, params.tensors, expected_o.data(),
                                     expected_lse.data(), 2);
        for (SimdLevel level : simd_levels()) {
            for (const Rung& rung : kRungs) {
                o.poison();
                lse.poison();
                run_rung(rung, level, params);
                const testing::Comparison o_error = testing::compare(
                    o.data(), dtype, {batch, heads, rows, dv},
                    {o.strides()[0], o.strides()[1], o.strides()[2], o.strides()[3]},
                    expected_o.data());
                const testing::Comparison lse_error =
                    testing::compare(lse.data(), DType::kFloat32, {batch, heads, rows, 1},
                                     {heads * rows, rows, 1, 1}, expected_lse.data());
                const double o_tolerance =
                    testing::output_tolerance(params.problem, o_error.max_expected);
                const double lse_tolerance =
                    testing::lse_tolerance(params.problem, lse_error.max_expected);
                CAPTURE(rung.name);
                CAPTURE(name_of(level));
                CAPTURE(name_of(dtype));
                CAPTURE(rows);
                CAPTURE(k.shape()[2]);
                CAPTURE(q.shape()[3]);
                CAPTURE(dv);
                CAPTURE(options.causal);
                CAPTURE(params.problem.mask_left);
                CAPTURE(params.problem.mask_right);
                CAPTURE(options.softcap);
                CAPTURE(bias.has_value());
                CAPTURE(mask.has_value());
                CAPTURE(seqlens_k);
                CHECK_MESSAGE(o_error.passed(o_tolerance * tolerance_factor),
                              "O: ", o_error.describe());
                CHECK_MESSAGE(lse_error.passed(lse_tolerance * tolerance_factor),
                              "lse: ", lse_error.describe());
                CHECK(o.padding_is_intact());
                CHECK(lse.padding_is_intact());
            }
        }
    }

    void check_all_masks() {
        options.causal = false;
        check();
        options.causal = true;
        for (Align align : {Align::kTopLeft, Align::kBottomRight}) {
            options.align = align;
            check();
        }
    }
};

// The bits of O and lse, to compare runs.
std::vector<float> result_of(Case& c, const Rung& rung, SimdLevel level, int num_threads) {
    HostTensor lse(DType::kFloat32, {c.o.shape()[0], c.o.shape()[1], c.o.shape()[2]});
    TensorView lse_view = lse.view();
    c.o.poison();
    run_rung(rung, level, c.params(&lse_view), num_threads);
    const float* o_data = static_cast<const float*>(c.o.data());
    const float* lse_data = static_cast<const float*>(lse.data());
    std::vector<float> result(o_data, o_data + c.o.numel());
    result.insert(result.end(), lse_data, lse_data + lse.numel());
    return result;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("odd sizes, every dtype and mask") {
    struct Sizes {
        int64_t seqlen_q, seqlen_k, head_dim, head_dim_v;
    };
    const Sizes sizes[] = {
        {1, 1, 1, 1},       {1, 300, 64, 64},   {2, 5, 8, 8},       {5, 2, 8, 8},
        {15, 17, 3, 5},     {16, 16, 16, 16},   {17, 31, 33, 7},    {25, 24, 20, 40},
        {33, 129, 65, 64},  {97, 97, 80, 80},   {128, 64, 64, 128}, {129, 257, 128, 96},
        {300, 130, 100, 9}, {130, 2, 31, 31},   {64, 65, 256, 256}, {40, 70, 300, 264},
        {7, 9, 1024, 1000}, {257, 513, 64, 64},
    };
    for (DType dtype : kDTypes) {
        for (const Sizes& s : sizes) {
            Case(dtype, 1, 2, 2, s.seqlen_q, s.seqlen_k, s.head_dim, s.head_dim_v)
                .check_all_masks();
        }
    }
}

TEST_CASE("batches and grouped heads") {
    for (int64_t heads_kv : {1, 2, 3, 6}) {
        Case(DType::kFloat32, 3, 6, heads_kv, 35, 50, 24, 40).check_all_masks();
    }
    Case(DType::kBFloat16, 2, 8, 2, 1, 100, 64, 64).check_all_masks();
}

TEST_CASE("a sequence of many tiles") {
    for (DType dtype : kDTypes) {
        Case c(dtype, 1, 1, 1, 70, 3000, 64, 64);
        c.options.align = Align::kBottomRight;
        c.options.causal = true;
        c.check();
    }
}

TEST_CASE("strides: transposed, padded, expanded, negative; any alignment") {
    const int64_t b = 2, h = 3, sq = 37, sk = 70, d = 20, dv = 12;
    for (DType dtype : kDTypes) {
        // (batch, seqlen, heads, head_dim) in memory
        Case(HostTensor(dtype, {b, h, sq, d}, {sq * h * d, d, h * d, 1}),
             HostTensor(dtype, {b, h, sk, d}, {sk * h * d, d, h * d, 1}),
             HostTensor(dtype, {b, h, sk, dv}, {sk * h * dv, dv, h * dv, 1}),
             HostTensor(dtype, {b, h, sq, dv}, {sq * h * dv, dv, h * dv, 1}))
            .check_all_masks();
        // rows with gaps, from an odd address
        Case(HostTensor(dtype, {b, h, sq, d}, {h * sq * 23, sq * 23, 23, 1}, 1),
             HostTensor(dtype, {b, h, sk, d}, {h * sk * 21, sk * 21, 21, 1}, 3),
             HostTensor(dtype, {b, h, sk, dv}, {h * sk * 15, sk * 15, 15, 1}, 5),
             HostTensor(dtype, {b, h, sq, dv}, {h * sq * 13, sq * 13, 13, 1}, 7))
            .check_all_masks();
        // k and v expanded over the batch, v over the keys; q and o from the end
        Case(HostTensor(dtype, {b, h, sq, d}, {-h * sq * d, sq * d, -d, 1}),
             HostTensor(dtype, {b, h, sk, d}, {0, sk * d, d, 1}),
             HostTensor(dtype, {b, h, sk, dv}, {0, dv, 0, 1}),
             HostTensor(dtype, {b, h, sq, dv}, {h * sq * dv, -sq * dv, -dv, 1}))
            .check_all_masks();
    }
}

TEST_CASE("scale: zero, negative, tiny, large") {
    for (float scale : {0.0f, -0.3f, 1e-40f, 1e-6f, 30.0f}) {
        Case c(DType::kFloat32, 1, 2, 1, 45, 83, 16, 16);
        c.options.softmax_scale = scale;
        c.options.causal = true;
        // Logits of some hundred have an absolute error that exp turns into a relative one.
        c.check(scale > 1 ? 100 : 1);
    }
}

TEST_CASE("rows that see no key, and no keys at all") {
    Case causal(DType::kFloat32, 1, 2, 2, 200, 3, 16, 16);
    causal.options.causal = true;
    causal.options.align = Align::kBottomRight;
    causal.check();

    for (DType dtype : kDTypes) Case(dtype, 2, 2, 1, 5, 0, 8, 8).check();

    Case null_keys(DType::kFloat32, 2, 2, 2, 5, 0, 8, 8);
    HostTensor& o = null_keys.o;
    TensorView k = null_keys.k.view(), v = null_keys.v.view();
    k.data = v.data = nullptr;
    const Params params = make_params(null_keys.q.view(), k, v, o.view(), nullptr, {});
    for (const Rung& rung : kRungs) {
        o.poison();
        run_rung(rung, cpu_simd_level(), params);
        CHECK(o.at({1, 1, 4, 7}) == 0.0f);
        CHECK(o.padding_is_intact());
    }
}

TEST_CASE("NaN and inf where no query may see them have no effect") {
    for (DType dtype : kDTypes) {
        for (float bad : {kNan, kInf, -kInf}) {
            Case c(dtype, 1, 2, 1, 100, 150, 24, 40);
            c.options.causal = true;  // rows see up to 100 of 150 keys
            for (int64_t j : {100, 110, 149}) {
                for (int64_t d = 0; d < 24; ++d) c.k.set({0, 0, j, d}, bad);
                for (int64_t d = 0; d < 40; ++d) c.v.set({0, 0, j, d}, bad);
            }
            c.check();
        }
    }
}

TEST_CASE("NaN and inf reach the rows that see them, and no other") {
    for (DType dtype : kDTypes) {
        for (float bad : {kNan, kInf, -kInf}) {
            for (int64_t j : {0, 37, 70, 99}) {
                Case in_v(dtype, 1, 2, 1, 100, 100, 24, 40);
                in_v.options.causal = true;
                in_v.v.set({0, 0, j, 5}, bad);
                in_v.check();

                Case in_k(dtype, 1, 2, 1, 100, 100, 24, 40);
                in_k.options.causal = true;
                in_k.k.set({0, 0, j, 3}, bad);  // logits of either sign
                in_k.check();

                Case in_q(dtype, 1, 2, 1, 100, 100, 24, 40);
                in_q.q.set({0, 1, j, 23}, bad);
                in_q.check();
            }
        }
    }
}

TEST_CASE("logits of -inf weigh nothing; where all are, O = 0") {
    for (DType dtype : kDTypes) {
        Case c(dtype, 1, 1, 1, 40, 200, 8, 8);
        c.q.fill([](int64_t) { return 1.0f; });
        c.k.set({0, 0, 0, 0}, -kInf);
        c.k.set({0, 0, 150, 0}, -kInf);
        c.options.causal = true;  // row 0 sees key 0 alone
        c.check();
        c.options.causal = false;
        c.check();
        // The first tiles hold nothing but -inf.
        c.k.fill([](int64_t i) { return i < 190 * 8 ? -kInf : 1.0f; });
        c.check();
        c.k.fill([](int64_t) { return -kInf; });
        c.check();
    }
}

// ---- Window, softcap, bias, mask, seqlens_k ----

TEST_CASE("a window, from either corner") {
    const std::optional<int64_t> none, sides[] = {none, 0, 3, 40, 150, 100000};
    struct Sizes {
        int64_t seqlen_q, seqlen_k;
    };
    for (const Sizes& s : {Sizes{1, 300}, {200, 70}, {130, 333}, {300, 300}}) {
        Case c(DType::kFloat32, 1, 2, 1, s.seqlen_q, s.seqlen_k, 20, 12);
        for (Align align : {Align::kTopLeft, Align::kBottomRight}) {
            c.options.align = align;
            for (const auto& left : sides) {
                for (const auto& right : sides) {
                    c.options.window_left = left, c.options.window_right = right;
                    c.check();
                }
            }
        }
    }
    for (DType dtype : kDTypes) {
        Case c(dtype, 2, 2, 1, 500, 700, 64, 64);
        c.options.window_left = 100;
        c.options.causal = true;
        c.check();
    }
}

TEST_CASE("softcap: logits far below, around and far above it") {
    for (DType dtype : kDTypes) {
        for (float softcap : {1e-19f, 0.2f, 5.0f, 50.0f, 1e6f}) {
            for (float scale : {0.01f, 1.0f, -8.0f}) {
                Case c(dtype, 1, 2, 2, 45, 170, 16, 16);
                c.options.softcap = softcap;
                c.options.softmax_scale = scale;
                // Logits of some ten: as in the test of large scales.
                c.check(softcap > 10 && scale < -1 ? 20 : 1);
            }
        }
    }
}

TEST_CASE("softcap's tanh is right to a few units in the last place") {
    for (SimdLevel level : simd_levels()) {
        const SimdKernels& simd = simd_kernels(level);
        const int width = simd.vector;
        const double log2e = 1.4426950408889634;
        double worst = 0;
        for (int step = 0; step < 40000; ++step) {
            float s[kMaxVector] = {}, x[kMaxVector] = {};
            for (int lane = 0; lane < width; ++lane) {  // 1e-9 to 30, of both signs
                const double power = std::pow(10.0, -9 + 10.5 * (step + lane / 16.0) / 40000);
                s[lane] = x[lane] = static_cast<float>(lane % 2 ? power : -power);
            }
            simd.apply_softcap(s, 1, width, 1.0f);
            for (int lane = 0; lane < width; ++lane) {
                const double expected = std::tanh(static_cast<double>(x[lane])) * log2e;
                worst = std::max(worst, std::abs(s[lane] / expected - 1) * (1 << 24));
            }
        }
        CAPTURE(name_of(level));
        CHECK(worst <= 6);

        float edges[kMaxVector] = {0.0f, 1e-45f, kInf, -kInf};
        edges[simd.vector - 1] = kNan;
        simd.apply_softcap(edges, 1, simd.vector, 2.0f);
        CHECK(edges[0] == 0.0f);
        CHECK(std::abs(edges[1]) <= 1e-44f);
        CHECK(edges[2] == doctest::Approx(2 * log2e));
        if (simd.vector > 4) CHECK(edges[3] == doctest::Approx(-2 * log2e));
        CHECK(std::isnan(edges[simd.vector - 1]));
    }
}

TEST_CASE("bias and mask of every shape that broadcasts") {
    const int64_t b = 2, h = 4, sq = 41, sk = 150;
    for (DType dtype : kDTypes) {
        for (int axes = 0; axes < 16; ++axes) {
            const std::vector<int64_t> shape = {axes & 1 ? b : 1, axes & 2 ? h : 1,
                                                axes & 4 ? sq : 1, axes & 8 ? sk : 1};
            Case c(dtype, b, h, 2, sq, sk, 16, 24);
            c.options.causal = axes % 3 == 0;
            c.bias = HostTensor(axes % 2 ? DType::kFloat32 : dtype, shape);
            c.bias->fill_normal(4, 2.0f);
            c.check();
            c.mask = BoolTensor(shape);
            c.check();
            c.bias.reset();
            c.check();
        }
        Case two_axes(dtype, b, h, 2, sq, sk, 16, 24);
        two_axes.bias = HostTensor(dtype, {sq, sk});
        two_axes.bias->fill_normal(4);
        two_axes.mask = BoolTensor({h, 1, sk});
        two_axes.check();
    }
}

TEST_CASE("bias and mask with any strides and alignment") {
    const int64_t b = 2, h = 2, sq = 41, sk = 150;
    for (DType dtype : kDTypes) {
        Case c(dtype, b, h, 1, sq, sk, 16, 24);
        c.bias = HostTensor(dtype, {b, h, sq, sk}, {h * sq * sk, sq * sk, 1, sq}, 1);
        c.bias->fill_normal(4);
        c.mask = BoolTensor({b, h, sq, sk}, {h * sq * sk, sq * sk, 1, sq});
        c.check();
        c.bias = HostTensor(dtype, {b, h, sq, sk}, {1, -sq * sk * 6, sk * 3 + 4, 3}, 3);
        c.bias->fill_normal(4);
        c.mask = BoolTensor({b, h, sq, sk}, {sk, 2 * sk, 4 * sk, 1});
        c.check();
        c.bias = HostTensor(dtype, {b, h, sq, sk}, {h * sq * sk, sq * sk, -sk, -1});
        c.bias->fill_normal(4);
        c.check();
    }
}

TEST_CASE("seqlens_k: none, some, all, more, fewer than none") {
    for (DType dtype : kDTypes) {
        Case c(dtype, 7, 2, 1, 35, 200, 16, 24);
        c.seqlens_k = {0, 1, 37, 199, 200, 1000, -5};
        c.check_all_masks();
        c.options.window_left = 20;
        c.check();
        c.options.window_right = 10;
        c.options.causal = false;
        c.check_all_masks();
    }
}

namespace {

// What bit `i` of `features` asks for; all that is hidden of K, V and bias holds `bad`.
constexpr int kNumFeatures = 6;
void add_features(Case& c, int features, float bad) {
    const int64_t sq = c.q.shape()[2], sk = c.k.shape()[2];
    if (features & 1) c.options.window_left = sk / 3;
    if (features & 2) c.options.causal = true;
    if (features & 4) c.options.softcap = 3.0f;
    if (features & 8) {
        c.bias = HostTensor(DType::kFloat32, {2, 1, sq, sk});
        c.bias->fill_normal(4);
    }
    if (features & 16) c.mask = BoolTensor({2, 1, 1, sk});
    if (features & 32) c.seqlens_k = {static_cast<int32_t>(sk / 2), static_cast<int32_t>(sk)};

    const Params params = c.params(nullptr);
    for (int64_t b = 0; b < 2; ++b) {
        const Mask bounds = mask_of(params.problem, params.tensors, b);
        for (int64_t j = 0; j < sk; ++j) {
            bool seen = false;
            for (int64_t i = 0; i < sq; ++i) {
                const bool sees = bounds.sees_key(i, static_cast<int>(j)) &&
                                  !(c.mask && c.mask->bytes[b * sk + j] == 0);
                if (!sees && c.bias) c.bias->set({b, 0, i, j}, bad);
                seen = seen || sees;
            }
            if (seen) continue;
            c.k.set({b, 0, j, j % c.k.shape()[3]}, bad);
            c.v.set({b, 0, j, j % c.v.shape()[3]}, bad);
        }
    }
}

}  // namespace

TEST_CASE("every pair of features and all of them, around hidden NaN and inf") {
    for (DType dtype : kDTypes) {
        for (int one = 0; one < kNumFeatures; ++one) {
            for (int other = one; other < kNumFeatures; ++other) {
                for (float bad : {kNan, kInf}) {
                    for (Align align : {Align::kTopLeft, Align::kBottomRight}) {
                        Case c(dtype, 2, 2, 1, 75, 190, 24, 20);
                        c.options.align = align;
                        add_features(c, 1 << one | 1 << other, bad);
                        c.check();
                    }
                }
            }
        }
        Case all(dtype, 2, 2, 1, 75, 190, 24, 20);
        add_features(all, (1 << kNumFeatures) - 1, kNan);
        all.check();
    }
}

TEST_CASE("hidden from some rows only: NaN and inf in K and V reach the others") {
    for (DType dtype : kDTypes) {
        for (float bad : {kNan, kInf}) {
            Case c(dtype, 1, 2, 1, 70, 300, 24, 20);
            c.mask = BoolTensor({70, 300});
            for (int64_t j : {3, 150, 290}) c.v.set({0, 0, j, 5}, bad);
            c.check();
            c.options.window_left = 20;
            c.options.align = Align::kBottomRight;
            c.check();
            c.k.set({0, 0, 250, 5}, bad);
            c.check();
        }
    }
}

TEST_CASE("a bias of NaN or inf where it is seen") {
    for (float bad : {kNan, kInf, -kInf}) {
        Case c(DType::kFloat32, 1, 1, 1, 70, 300, 24, 20);
        c.bias = HostTensor(DType::kFloat32, {70, 300});
        c.bias->fill_normal(4);
        for (int64_t i = 0; i < 60; ++i) c.bias->set({i, (i * 7) % 300}, bad);
        c.check();
        c.options.causal = true;
        c.check();
    }
}

TEST_CASE("rows without a key by bias, mask or length give 0 and -inf") {
    for (DType dtype : kDTypes) {
        Case c(dtype, 1, 2, 2, 40, 150, 16, 16);
        c.mask = BoolTensor({40, 150});
        for (int64_t i : {0, 5, 39}) std::fill_n(c.mask->bytes.begin() + i * 150, 150, uint8_t{0});
        c.check();
        c.mask.reset();
        c.bias = HostTensor(dtype, {40, 150});
        c.bias->fill([](int64_t i) { return i / 150 % 3 == 0 || i % 150 < 140 ? -kInf : 1.0f; });
        c.check();
        c.seqlens_k = {140};
        c.check();
        CHECK(c.o.at({0, 1, 39, 15}) == 0.0f);
    }
}

TEST_CASE("nothing outside the tensors is touched") {
    // Every tensor lies between two pages that may not be read or written, once against the first
    // and once against the second; touching one ends the program.
    const int64_t page = sysconf(_SC_PAGESIZE);
    for (DType dtype : kDTypes) {
        for (bool at_end : {false, true}) {
            for (int64_t d : {1, 7, 16, 33, 64}) {
                std::vector<std::pair<void*, size_t>> mappings;
                const auto guarded = [&](DType type, std::vector<int64_t> shape) {
                    TensorView t;
                    t.dtype = type;
                    t.ndim = static_cast<int>(shape.size());
                    int64_t elements = 1;
                    for (int i = t.ndim - 1; i >= 0; --i) {
                        t.shape[i] = shape[i];
                        t.strides[i] = elements;
                        elements *= shape[i];
                    }
                    const int64_t bytes = elements * size_of(type);
                    const int64_t middle = (bytes + page - 1) / page * page;
                    void* base = mmap(nullptr, middle + 2 * page, PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                    REQUIRE(base != MAP_FAILED);
                    mappings.emplace_back(base, middle + 2 * page);
                    char* data = static_cast<char*>(base) + page;
                    REQUIRE(mprotect(data, middle, PROT_READ | PROT_WRITE) == 0);
                    t.data = at_end ? data + middle - bytes : data;
                    return t;
                };
                const int64_t sq = 35, sk = 67, dv = d + 2;
                const TensorView q = guarded(dtype, {1, 2, sq, d}),
                                 k = guarded(dtype, {1, 1, sk, d});
                const TensorView v = guarded(dtype, {1, 1, sk, dv});
                const TensorView o = guarded(dtype, {1, 2, sq, dv});
                const TensorView lse = guarded(DType::kFloat32, {1, 2, sq});
                const TensorView bias = guarded(dtype, {1, 2, sq, sk});
                const TensorView mask = guarded(DType::kBool, {1, 2, sq, sk});
                const TensorView seqlens_k = guarded(DType::kInt32, {1});
                std::memset(mask.data, 1, 2 * sq * sk);
                *static_cast<int32_t*>(seqlens_k.data) = sk;
                Options options;
                options.causal = true;
                options.align = Align::kBottomRight;
                if (d != 33) options.bias = &bias, options.mask = &mask;
                if (d != 33) options.seqlens_k = &seqlens_k;
                const Params params = make_params(q, k, v, o, &lse, options);
                for (SimdLevel level : simd_levels()) {
                    for (const Rung& rung : kRungs) {
                        run_rung(rung, level, params);
                        // q = k = 0: all weights are equal.
                        const float expected = std::log(static_cast<float>(sk - sq + 1));
                        CHECK(static_cast<float*>(lse.data)[0] == doctest::Approx(expected));
                    }
                }
                for (const auto& [base, bytes] : mappings) munmap(base, bytes);
            }
        }
    }
}

TEST_CASE("the same bits on every run and with any number of threads") {
    Case plain(DType::kFloat32, 2, 3, 3, 150, 260, 48, 40);
    plain.options.causal = true;
    Case all(DType::kFloat32, 2, 3, 1, 150, 260, 48, 40);
    add_features(all, (1 << kNumFeatures) - 1, kNan);
    for (Case* c : {&plain, &all}) {
        for (SimdLevel level : simd_levels()) {
            for (const Rung& rung : kRungs) {
                const std::vector<float> once = result_of(*c, rung, level, 1);
                for (int num_threads : {1, 2, 7}) {
                    CHECK(same_bits(once, result_of(*c, rung, level, num_threads)));
                }
            }
        }
    }
}

TEST_CASE("calls from several threads at once, and in a child after a fork") {
    Case c(DType::kFloat32, 2, 4, 4, 150, 200, 64, 64);
    for (const Rung& rung : kRungs) {
        const std::vector<float> expected = result_of(c, rung, cpu_simd_level(), 2);

        std::atomic<int> right{0};
        std::vector<std::thread> callers;
        callers.reserve(4);
        for (int i = 0; i < 4; ++i) {
            callers.emplace_back([&] {
                Case own = c;
                right += same_bits(expected, result_of(own, rung, cpu_simd_level(), 2));
            });
        }
        for (std::thread& caller : callers) caller.join();
        CHECK(right == 4);

        const pid_t child = fork();
        if (child == 0) {
            alarm(30);
            _exit(same_bits(expected, result_of(c, rung, cpu_simd_level(), 2)) ? 0 : 1);
        }
        int status = -1;
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
    }
}

TEST_CASE("parallel_for runs every task once, on the threads it was given") {
    for (int num_threads : {1, 3}) {
        std::vector<std::atomic<int>> calls(1000);
        std::atomic<bool> in_range{true};
        parallel_for(1000, num_threads, [&](int64_t task, int worker) {
            calls[task]++;
            if (worker < 0 || worker >= num_threads) in_range = false;
        });
        for (const auto& count : calls) REQUIRE(count == 1);
        CHECK(in_range);
        CHECK_THROWS_WITH_AS(parallel_for(10, num_threads,
                                          [](int64_t task, int) {
                                              if (task == 5) throw std::runtime_error("task 5");
                                          }),
                             "task 5", std::runtime_error);
    }
    parallel_for(0, 4, [](int64_t, int) { FAIL("there is no task"); });
}

TEST_CASE("the thread limit is honoured, and small problems stay on the caller's thread") {
    Problem large;
    large.batch = large.num_heads = large.num_heads_kv = 8;
    large.seqlen_q = large.seqlen_k = large.mask_right = 512;
    large.head_dim = large.head_dim_v = 64;
    Problem small = large;
    small.batch = small.num_heads = small.num_heads_kv = 1;
    small.seqlen_q = small.seqlen_k = small.mask_right = 16;

    set_cpu_threads(6);
    CHECK(useful_threads(large, 100, 16) == 6);
    CHECK(useful_threads(large, 100, 4) == 4);
    CHECK(useful_threads(large, 3, 16) == 3);
    CHECK(useful_threads(small, 100, 16) == 1);
    set_cpu_threads(1);
    CHECK(useful_threads(large, 100, 16) == 1);
    set_cpu_threads(0);
}

TEST_CASE("16-bit floats are converted exactly, and back to the nearest even") {
    std::vector<uint16_t> all(1 << 16);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    // Around every 16-bit value, its neighbours in float32 and the ties between two.
    std::vector<float> values;
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (size_t i = 0; i < all.size(); ++i) {
            const uint32_t bits =
                testing::float_to_bits(testing::load_element(all.data(), dtype, i));
            const uint32_t tie = dtype == DType::kFloat16 ? 1u << 12 : 1u << 15;
            for (uint32_t other : {bits, bits + 1, bits + tie - 1, bits + tie, bits + tie + 1}) {
                values.push_back(testing::bits_to_float(other));
            }
        }
        for (int i = 0; i < 30000; ++i) {  // float16's subnormals, from below the smallest
            values.push_back(std::ldexp(1.0f + i % 97 / 97.0f, -26 + i % 13));
            values.push_back(-values.back());
        }
    }
    values.resize(values.size() / 16 * 16);
    const int64_t n = static_cast<int64_t>(values.size());
    const float one = 1.0f;
    for (SimdLevel level : simd_levels()) {
        const SimdKernels& simd = simd_kernels(level);
        for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
            CAPTURE(name_of(level));
            CAPTURE(name_of(dtype));
            std::vector<float> wide(all.size());
            simd.load_rows(dtype, all.data(), 0, 1, 1, 1 << 16, nullptr, wide.data(), 0);
            int64_t wrong = 0;
            for (size_t i = 0; i < all.size(); ++i) {
                const float expected = testing::load_element(all.data(), dtype, i);
                const bool both_nan = std::isnan(expected) && std::isnan(wide[i]);
                wrong += !both_nan &&
                         testing::float_to_bits(wide[i]) != testing::float_to_bits(expected);
            }
            CHECK(wrong == 0);

            std::vector<uint16_t> narrow(n);
            simd.store_rows(dtype, values.data(), 0, 1, n, &one, narrow.data(), 0);
            for (int64_t i = 0; i < n; ++i) {
                const uint16_t expected = dtype == DType::kFloat16
                                              ? testing::float_to_fp16(values[i])
                                              : testing::float_to_bf16(values[i]);
                const bool both_nan = std::isnan(values[i]) &&
                                      std::isnan(testing::load_element(&narrow[i], dtype, 0));
                wrong += !both_nan && narrow[i] != expected;
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("all 256 codes of fp8 are converted exactly") {
    std::vector<uint8_t> all(256 + 5);  // and a last vector that is not whole
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint8_t>(i);
    for (SimdLevel level : simd_levels()) {
        CAPTURE(name_of(level));
        std::vector<float> wide(256 + kMaxVector);
        simd_kernels(level).load_rows(DType::kFloat8E4M3, all.data(), 0, 1, 1,
                                      static_cast<int64_t>(all.size()), nullptr, wide.data(), 0);
        for (size_t i = 0; i < all.size(); ++i) {
            CAPTURE(i);
            const float expected = testing::e4m3_to_float(all[i]);
            CHECK((std::isnan(expected)
                       ? std::isnan(wide[i])
                       : testing::float_to_bits(wide[i]) == testing::float_to_bits(expected)));
        }
    }
}

TEST_CASE("keys and values in fp8, by a descale of each head") {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (int64_t head_dim : {1, 33, 64, 128, 200}) {
            for (int64_t seqlen_q : {1, 5, 70}) {
                Case c(HostTensor(dtype, {2, 6, seqlen_q, head_dim}),
                       HostTensor(DType::kFloat8E4M3, {2, 2, 130, head_dim}),
                       HostTensor(DType::kFloat8E4M3, {2, 2, 130, 24}),
                       HostTensor(dtype, {2, 6, seqlen_q, 24}));
                HostTensor scales(DType::kFloat32, {2, 2});
                scales.fill([](int64_t i) { return 0.3f + 0.4f * static_cast<float>(i); });
                const TensorView both = scales.view();
                TensorView heads = scales.view();
                heads.ndim = 1, heads.strides[0] = 2;
                c.options.v_descale = &both;
                c.check_all_masks();
                c.options.k_descale = &heads;
                c.options.softcap = 2.0f, c.options.window_left = 40;
                c.seqlens_k = {130, 77};
                c.check();
            }
        }
    }
}

TEST_CASE("the softmax's exponential is right to a unit in the last place") {
    for (SimdLevel level : simd_levels()) {
        const SimdKernels& simd = simd_kernels(level);
        const int width = simd.panel;
        double worst = 0;
        for (int64_t step = 0; step < 40000; ++step) {
            float s[kMaxPanel] = {}, p[kMaxPanel] = {};
            float row_max[kMaxPanel] = {}, row_sum[kMaxPanel] = {}, alpha[kMaxPanel] = {};
            for (int lane = 0; lane < width; ++lane) {
                s[lane] = -static_cast<float>(step * width + lane) * (126.0f / 40000 / width);
            }
            std::memcpy(p, s, sizeof p);
            simd.softmax(p, 1, width, row_max, row_sum, alpha);
            for (int lane = 0; lane < width; ++lane) {
                const double expected = std::exp2(static_cast<double>(s[lane]));
                const double ulp = std::ldexp(1.0, static_cast<int>(std::floor(s[lane])) - 23);
                worst = std::max(worst, std::abs(p[lane] - expected) / ulp);
            }
        }
        CAPTURE(name_of(level));
        CHECK(worst <= 1.5);

        float edges[kMaxPanel] = {0.0f, -127.5f, -1000.0f, -kInf, kNan};
        float row_max[kMaxPanel] = {}, row_sum[kMaxPanel] = {}, alpha[kMaxPanel];
        simd.softmax(edges, 1, simd.panel, row_max, row_sum, alpha);
        CHECK(edges[0] == 1.0f);
        CHECK(edges[1] == 0.0f);
        CHECK(edges[2] == 0.0f);
        CHECK(edges[3] == 0.0f);
        CHECK(std::isnan(edges[4]));
    }
}
