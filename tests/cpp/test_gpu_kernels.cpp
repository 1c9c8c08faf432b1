// Every CUDA kernel against the float64 oracle: all shapes, strides, dtypes and masks it supports.
//
// Inputs are standard normal (unless a case says otherwise) and lie in NaN: what is read without
// being there, or is there without being visible, shows. Outputs start as NaN between guards. The
// bounds on the error are output_tolerance and lse_tolerance in testing/compare.h.
#include <fa101/device_info.h>
#include <fa101/error.h>
#include <fa101/kv_cache.h>
#include <fa101/params.h>
#include <fa101/plan.h>

#include "common/launch.h"
#include "flash_attn_sm90/tile_config.h"
#include "flash_attn_sm90_split_d/tile_config.h"
#include "testing/compare.h"
#include "testing/host_tensor.h"
#include "testing/reference.h"

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace fa101;
using fa101::testing::Comparison;
using fa101::testing::HostTensor;

namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// main() looks here: without a GPU the program reports "skipped", also when it runs outside ctest.
[[maybe_unused]] const int kNeedsGpu = setenv("FA101_TEST_NEEDS_GPU", "1", /*overwrite=*/0);

void cuda(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// A kernel that hangs would hang every test after it: a case that takes a minute ends the program.
class Watchdog {
  public:
    void begin(std::string what) {
        const std::lock_guard<std::mutex> lock(mutex_);
        what_ = std::move(what);
        since_ = std::chrono::steady_clock::now();
        if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
    }
    ~Watchdog() {
        stop_ = true;
        if (thread_.joinable()) thread_.join();
    }

  private:
    void watch() {
        while (!stop_) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            const std::lock_guard<std::mutex> lock(mutex_);
            if (std::chrono::steady_clock::now() - since_ > std::chrono::seconds(60)) {
                std::fprintf(stderr, "a case took more than 60 s: %s\n", what_.c_str());
                std::_Exit(1);
            }
        }
    }

    std::mutex mutex_;
    std::string what_;
    std::chrono::steady_clock::time_point since_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};
Watchdog watchdog;

// Device memory of one case, handed out in pieces, each followed by 256 bytes of 0xa5 that must
// survive.
class Arena {
  public:
    ~Arena() { cudaFree(base_); }

    void* take(size_t bytes) {
        constexpr size_t kBytes = size_t{1} << 30;
        if (base_ == nullptr) cuda(cudaMalloc(reinterpret_cast<void**>(&base_), kBytes));
        const size_t end = used_ + (bytes + kCanary - 1) / kCanary * kCanary;
        if (end + kCanary > kBytes) throw std::runtime_error("the test's arena is full");
        std::byte* const piece = base_ + used_;
        cuda(cudaMemset(base_ + end, kCanaryByte, kCanary));
        canaries_.push_back(end);
        used_ = end + kCanary;
        return piece;
    }
    bool is_intact() const {
        std::vector<unsigned char> bytes(kCanary);
        for (size_t canary : canaries_) {
            cuda(cudaMemcpy(bytes.data(), base_ + canary, kCanary, cudaMemcpyDeviceToHost));
            for (unsigned char byte : bytes) {
                if (byte != kCanaryByte) return false;
            }
        }
        return true;
    }
    size_t mark() const { return used_; }
    void release(size_t mark) {
        used_ = mark;
        while (!canaries_.empty() && canaries_.back() >= mark) canaries_.pop_back();
    }

  private:
    static constexpr size_t kCanary = 256;
    static constexpr unsigned char kCanaryByte = 0xa5;
    std::byte* base_ = nullptr;
    size_t used_ = 0;
    std::vector<size_t> canaries_;
};
Arena arena;

// The device's copy of a host tensor, padding and guards included.
struct Mirror {
    explicit Mirror(HostTensor& tensor)
        : host(tensor), storage(arena.take(tensor.storage_bytes())) {
        upload();
    }
    void upload() const {
        cuda(cudaMemcpy(storage, host.storage(), host.storage_bytes(), cudaMemcpyHostToDevice));
    }
    void download() const {
        cuda(cudaMemcpy(host.storage(), storage, host.storage_bytes(), cudaMemcpyDeviceToHost));
    }
    TensorView view() const {
        TensorView v = host.view();
        v.data = static_cast<std::byte*>(storage) +
                 (static_cast<std::byte*>(host.data()) - host.storage());
        v.device = {DeviceType::kCuda, 0};
        return v;
    }
    HostTensor& host;
    void* storage;
};

// The GPU as the planner sees it; a test may pretend that it has less shared memory.
DeviceInfo& gpu() {
    static DeviceInfo info = device_info({DeviceType::kCuda, 0});
    return info;
}

// A kernel by one of its strategies.
struct Variant {
    std::string kernel;
    Strategy strategy;

    std::string name() const { return kernel + " by " + name_of(strategy); }
    // Tests speak of small head_dims; split_d takes what is 256 wider.
    int64_t head_dim(int64_t usual) const {
        return strategy == Strategy::kSplitD ? usual + 256 : usual;
    }
    Plan plan(const Problem& problem) const {
        return fa101::plan(problem, gpu(), kernel, name_of(strategy));
    }
    bool fits(const Problem& problem) const {
        try {
            plan(problem);
            return true;
        } catch (const InvalidArgument&) {
            return false;
        }
    }
};

std::vector<Variant> cuda_kernels() {
    std::vector<Variant> variants;
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.device != DeviceType::kCuda) continue;
        for (Strategy strategy : kernel.strategies) variants.push_back({kernel.name, strategy});
    }
    return variants;
}

// Inputs and output of one call; o is only its shape and place.
struct Arrays {
    HostTensor q, k, v, o;
    std::optional<HostTensor> bias = {}, mask = {}, seqlens_k = {}, page_table = {};
    std::optional<HostTensor> k_descale = {}, v_descale = {};
};

struct Sizes {
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
};

Arrays dense(DType dtype, const Sizes& s, uint64_t seed = 1) {
    Arrays a{HostTensor(dtype, {s.batch, s.heads, s.seqlen_q, s.head_dim}),
             HostTensor(dtype, {s.batch, s.heads_kv, s.seqlen_k, s.head_dim}),
             HostTensor(dtype, {s.batch, s.heads_kv, s.seqlen_k, s.head_dim_v}),
             HostTensor(dtype, {s.batch, s.heads, s.seqlen_q, s.head_dim_v})};
    a.q.fill_normal(seed), a.k.fill_normal(seed + 1), a.v.fill_normal(seed + 2);
    return a;
}

HostTensor ints(const std::vector<int64_t>& shape, const std::vector<int32_t>& values) {
    HostTensor tensor(DType::kInt32, shape);
    std::copy(values.begin(), values.end(), static_cast<int32_t*>(tensor.data()));
    return tensor;
}

// K and V of those lengths in shuffled pages; every second page is nobody's and full of NaN, like
// the rows past a sequence's end, for which the table has nonsense.
Arrays paged(DType dtype, const Sizes& s, int64_t page_size, const std::vector<int32_t>& lengths) {
    const int64_t max_pages = s.seqlen_k / page_size, num_pages = 2 * s.batch * max_pages;
    Arrays a{HostTensor(dtype, {s.batch, s.seqlen_q, s.heads, s.head_dim}),
             HostTensor(dtype, {num_pages, page_size, s.heads_kv, s.head_dim}),
             HostTensor(dtype, {num_pages, page_size, s.heads_kv, s.head_dim_v}),
             HostTensor(dtype, {s.batch, s.seqlen_q, s.heads, s.head_dim_v})};
    a.q.fill_normal(1);
    std::vector<int32_t> table(static_cast<size_t>(s.batch * max_pages), -1);
    uint64_t index = 0;
    for (int64_t b = 0; b < s.batch; ++b) {
        for (int64_t j = 0; j < std::min<int64_t>(lengths[b], s.seqlen_k); ++j) {
            const int64_t i = b * max_pages + j / page_size;
            const int64_t page = 2 * (i * 7919 % (s.batch * max_pages)) + 1;
            table[i] = static_cast<int32_t>(page);
            for (int64_t h = 0; h < s.heads_kv; ++h) {
                for (int64_t d = 0; d < s.head_dim; ++d) {
                    a.k.set({page, j % page_size, h, d}, testing::normal_value(2, index++));
                }
                for (int64_t d = 0; d < s.head_dim_v; ++d) {
                    a.v.set({page, j % page_size, h, d}, testing::normal_value(3, index++));
                }
            }
        }
    }
    a.page_table = ints({s.batch, max_pages}, table);
    a.seqlens_k = ints({s.batch}, lengths);
    return a;
}

// The same with K and V rounded to fp8, K's descale by head, V's by batch entry and head.
Arrays in_fp8(Arrays a, int64_t batch, int64_t heads_kv) {
    for (HostTensor* x : {&a.k, &a.v}) {
        HostTensor codes(DType::kFloat8E4M3, x->shape());
        codes.fill([&](int64_t i) { return testing::load_element(x->data(), x->dtype(), i); });
        *x = codes;
    }
    a.k_descale.emplace(DType::kFloat32, std::vector<int64_t>{heads_kv});
    a.k_descale->fill([](int64_t i) { return 0.9f - 0.3f * static_cast<float>(i % 3); });
    a.v_descale.emplace(DType::kFloat32, std::vector<int64_t>{batch, heads_kv});
    a.v_descale->fill([](int64_t i) { return 0.7f + 0.4f * static_cast<float>(i); });
    return a;
}

std::string describe(const Problem& p, const Options& options) {
    std::string text = "(" + std::to_string(p.batch) + ", " + std::to_string(p.num_heads) + "/" +
                       std::to_string(p.num_heads_kv) + ", " + std::to_string(p.seqlen_q) + "x" +
                       std::to_string(p.seqlen_k) + ", " + std::to_string(p.head_dim) + "/" +
                       std::to_string(p.head_dim_v) + ") " + name_of(p.dtype_q);
    if (p.dtype_kv != p.dtype_q) text += std::string(" with ") + name_of(p.dtype_kv);
    if (options.causal) {
        text += options.align == Align::kTopLeft ? " causal top left" : " causal bottom right";
    }
    if (p.has_left_bound()) text += " from i + " + std::to_string(p.mask_left);
    if (p.has_right_bound()) text += " to i + " + std::to_string(p.mask_right);
    if (p.softcap > 0) text += " softcap";
    if (p.has_bias) text += std::string(" ") + name_of(p.dtype_bias) + " bias";
    if (p.has_mask) text += " mask";
    if (p.has_seqlens_k) text += " seqlens_k";
    if (p.page_size > 0) text += " pages of " + std::to_string(p.page_size);
    return text + " scale " + std::to_string(p.softmax_scale) +
           (p.aligned16 ? " aligned" : " unaligned");
}

struct Result {
    std::vector<std::byte> o;
    std::vector<float> lse;
    bool operator==(const Result& other) const {
        return o == other.o && lse.size() == other.lse.size() &&
               std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
    }
};

// One kernel on device arrays: poisons the outputs, runs, downloads.
Result run_kernel(const Variant& kernel, const Params& params, const Mirror& o, const Mirror* lse) {
    o.host.poison(), o.upload();
    if (lse != nullptr) lse->host.poison(), lse->upload();
    const Plan chosen = kernel.plan(params.problem);
    const size_t mark = arena.mark();
    void* workspace = nullptr;
    if (chosen.workspace_bytes > 0) {
        workspace = arena.take(static_cast<size_t>(chosen.workspace_bytes));
        cuda(cudaMemset(workspace, 0xff, static_cast<size_t>(chosen.workspace_bytes)));
    }
    run(chosen, params.problem, params.tensors, workspace, nullptr);
    cuda(cudaDeviceSynchronize());
    o.download();
    CHECK_MESSAGE(arena.is_intact(), kernel.name(), " wrote past the end of an array");
    CHECK_MESSAGE(o.host.padding_is_intact(), kernel.name(), " wrote outside of out");
    Result result;
    result.o.assign(o.host.storage(), o.host.storage() + o.host.storage_bytes());
    if (lse != nullptr) {
        lse->download();
        CHECK_MESSAGE(lse->host.padding_is_intact(), kernel.name(), " wrote outside of lse");
        const float* values = static_cast<const float*>(lse->host.data());
        result.lse.assign(values, values + lse->host.numel());
    }
    arena.release(mark);
    return result;
}

// What a kernel left on the host is what the oracle says. The tolerances are for logits around 1;
// an error of float32 in a larger one is that much larger.
void check_result(const std::string& what, const Params& params, const HostTensor& o,
                  const HostTensor& lse, const std::vector<double>& o_expected,
                  const std::vector<double>& lse_expected, double largest_logit = 1) {
    const Problem& p = params.problem;
    const Tensors& t = params.tensors;
    const Comparison in_o =
        testing::compare(o.data(), p.dtype_o, {p.batch, p.num_heads, p.seqlen_q, p.head_dim_v},
                         {t.o_batch_stride, t.o_head_stride, t.o_row_stride, 1}, o_expected.data());
    CHECK_MESSAGE(in_o.passed(largest_logit * testing::output_tolerance(p, in_o.max_expected)),
                  what, ": out: ", in_o.describe());
    const Comparison in_lse =
        testing::compare(lse.data(), DType::kFloat32, {p.batch, p.num_heads, p.seqlen_q, 1},
                         {p.num_heads * p.seqlen_q, p.seqlen_q, 1, 1}, lse_expected.data());
    CHECK_MESSAGE(in_lse.passed(testing::lse_tolerance(p, in_lse.max_expected)), what,
                  ": lse: ", in_lse.describe());
}

// Runs every kernel that supports the call, `repeats` times, and compares with the oracle.
void check(Arrays a, Options options = {}, int repeats = 1, double largest_logit = 1) {
    const size_t mark = arena.mark();
    TensorView extras[6];
    const auto give = [&](std::optional<HostTensor>& tensor, TensorView& view) {
        if (!tensor) return static_cast<const TensorView*>(nullptr);
        view = Mirror(*tensor).view();
        return static_cast<const TensorView*>(&view);
    };
    options.bias = give(a.bias, extras[0]);
    options.mask = give(a.mask, extras[1]);
    options.seqlens_k = give(a.seqlens_k, extras[2]);
    options.page_table = give(a.page_table, extras[3]);
    options.k_descale = give(a.k_descale, extras[4]);
    options.v_descale = give(a.v_descale, extras[5]);
    const std::vector<int64_t>& shape = a.q.shape();
    const bool bhsd = options.layout == Layout::kBHSD;
    HostTensor lse(DType::kFloat32, {shape[0], shape[bhsd ? 1 : 2], shape[bhsd ? 2 : 1]});
    const Mirror q(a.q), k(a.k), v(a.v), o(a.o), lse_mirror(lse);
    const TensorView lse_view = lse_mirror.view();
    const Params params = make_params(q.view(), k.view(), v.view(), o.view(), &lse_view, options);
    const Problem& p = params.problem;
    const std::string what = describe(p, options);
    watchdog.begin(what);

    Tensors host = params.tensors;
    host.q_ptr = a.q.data(), host.k_ptr = a.k.data(), host.v_ptr = a.v.data();
    if (a.bias) host.bias_ptr = a.bias->data();
    if (a.mask) host.mask_ptr = static_cast<const uint8_t*>(a.mask->data());
    if (a.seqlens_k) host.seqlens_k_ptr = static_cast<const int32_t*>(a.seqlens_k->data());
    if (a.page_table) host.page_table_ptr = static_cast<const int32_t*>(a.page_table->data());
    if (a.k_descale) host.k_descale.ptr = static_cast<const float*>(a.k_descale->data());
    if (a.v_descale) host.v_descale.ptr = static_cast<const float*>(a.v_descale->data());
    const int64_t rows = p.batch * p.num_heads * p.seqlen_q;
    std::vector<double> o_expected(rows * p.head_dim_v), lse_expected(rows);
    testing::reference_attention(p, host, o_expected.data(), lse_expected.data(),
                                 static_cast<int>(std::thread::hardware_concurrency()));

    int num_kernels = 0;
    for (const Variant& kernel : cuda_kernels()) {
        if (!kernel.fits(p)) continue;
        ++num_kernels;
        const Result first = run_kernel(kernel, params, o, &lse_mirror);
        check_result(kernel.name() + " " + what, params, a.o, lse, o_expected, lse_expected,
                     largest_logit);
        for (int i = 1; i < repeats; ++i) {
            CHECK_MESSAGE(run_kernel(kernel, params, o, &lse_mirror) == first, kernel.name(), " ",
                          what, ": run ", i, " gave other bits");
        }
    }
    CHECK_MESSAGE(num_kernels > 0, "no kernel takes ", what);
    arena.release(mark);
}

Options causal(Align align = Align::kTopLeft) {
    Options options;
    options.causal = true;
    options.align = align;
    return options;
}
const Options kNoMask, kTopLeft = causal(), kBottomRight = causal(Align::kBottomRight);

Options in_pages(std::optional<int64_t> window_left = {}) {
    Options options = kBottomRight;
    options.layout = Layout::kBSHD;
    options.window_left = window_left;
    return options;
}

// append() on the GPU does what it does on the CPU: 2 entries, room for 64 keys each, 5 new ones.
void check_append(DType dtype, DType dtype_cache, bool is_paged, int64_t head_dim,
                  int64_t rotary_dim, bool interleaved) {
    watchdog.begin("append");
    const size_t mark = arena.mark();
    HostTensor k(dtype, {2, 5, 3, head_dim}), v(dtype, {2, 5, 3, head_dim + 8});
    const std::vector<int64_t> rows =
        is_paged ? std::vector<int64_t>{7, 16} : std::vector<int64_t>{2, 64};
    HostTensor k_cache(dtype_cache, {rows[0], rows[1], 3, head_dim});
    HostTensor v_cache(dtype_cache, {rows[0], rows[1], 3, head_dim + 8});
    HostTensor k_descale(DType::kFloat32, {3}), v_descale(DType::kFloat32, {2, 3});
    k_descale.fill([](int64_t i) { return 0.01f + static_cast<float>(i); });
    v_descale.fill([](int64_t i) { return i == 0 ? 1e-3f : 0.3f * static_cast<float>(i); });
    HostTensor q(dtype, {2, 6, 4, head_dim}), q_rotated(dtype, {2, 6, 4, head_dim});
    HostTensor cos(DType::kFloat32, {64, rotary_dim / 2}), sin = cos;
    k.fill_normal(1), v.fill_normal(2), q.fill_normal(3), cos.fill_normal(4), sin.fill_normal(5);
    // The second sequence has room for two more; with pages the last of these is in none.
    HostTensor lengths = ints({2}, {14, 62}), table = ints({2, 4}, {3, 6, 0, 1, 2, 4, 5, 9});
    AppendOptions options;
    options.layout = Layout::kBSHD;
    options.interleaved = interleaved;
    const auto run = [&](auto view_of) {
        const TensorView lengths_view = view_of(lengths), table_view = view_of(table);
        const TensorView cos_view = view_of(cos), sin_view = view_of(sin);
        const TensorView q_view = view_of(q), rotated_view = view_of(q_rotated);
        const TensorView k_descale_view = view_of(k_descale), v_descale_view = view_of(v_descale);
        if (dtype_cache == DType::kFloat8E4M3) {
            options.k_descale = &k_descale_view, options.v_descale = &v_descale_view;
        }
        options.seqlens_k = &lengths_view;
        if (is_paged) options.page_table = &table_view;
        if (rotary_dim > 0) {
            options.cos = &cos_view, options.sin = &sin_view;
            options.q = &q_view, options.q_rotated = &rotated_view;
        }
        append(make_append_params(view_of(k), view_of(v), view_of(k_cache), view_of(v_cache),
                                  options));
    };
    HostTensor* const outputs[] = {&k_cache, &v_cache, &q_rotated};
    std::deque<Mirror> mirrors;
    run([&](HostTensor& tensor) {
        mirrors.emplace_back(tensor);
        return mirrors.back().view();
    });
    cuda(cudaDeviceSynchronize());
    std::vector<HostTensor> got;
    for (HostTensor* output : outputs) {
        for (const Mirror& mirror : mirrors) {
            if (&mirror.host != output) continue;
            mirror.download();
            got.push_back(*output);
            output->poison();
        }
    }
    CHECK(arena.is_intact());
    run([](HostTensor& tensor) { return tensor.view(); });
    for (size_t i = 0; i < got.size(); ++i) {
        HostTensor& expected = *outputs[i];
        CHECK(got[i].padding_is_intact());
        const auto& n = expected.shape();
        const auto& s = expected.strides();
        std::vector<double> values;
        for (int64_t j = 0; j < expected.numel(); ++j) {
            values.push_back(testing::load_element(expected.data(), expected.dtype(), j));
        }
        const Comparison in =
            testing::compare(got[i].data(), expected.dtype(), {n[0], n[1], n[2], n[3]},
                             {s[0], s[1], s[2], s[3]}, values.data());
        // Copies are exact; a rotation may be rounded the other way.
        const double tolerance =
            rotary_dim == 0 ? 0 : 4 * testing::roundoff_of(expected.dtype()) * in.max_expected;
        CHECK_MESSAGE(in.passed(tolerance), name_of(dtype), " to ", name_of(dtype_cache),
                      " output ", i, ": ", in.describe());
    }
    arena.release(mark);
}

// One call by append() and run(), and by append_and_run(), captured: the same bits of the result
// and of the caches, and so many kernels in the graph. Room for 640 keys; of 3 sequences one is
// empty, one crosses the border of a step, and one has room for a single row.
void check_append_and_run(DType dtype, DType dtype_cache, int64_t num_new, bool is_paged,
                          Options options, size_t num_kernels) {
    watchdog.begin("append_and_run");
    const size_t mark = arena.mark();
    const Sizes sizes{3, 4, 2, 2, 640, 64, 64};
    Arrays a = is_paged ? paged(dtype, sizes, 16, {640, 640, 640}) : dense(dtype, sizes);
    if (dtype_cache == DType::kFloat8E4M3) a = in_fp8(std::move(a), 3, 2);
    HostTensor lengths = ints({3}, {0, 510, 639}), lse(DType::kFloat32, {3, 4, 2});
    const std::vector<int64_t> shape = is_paged ? std::vector<int64_t>{3, num_new, 2, 64}
                                                : std::vector<int64_t>{3, 2, num_new, 64};
    HostTensor k_new(dtype, shape), v_new(dtype, shape);
    k_new.fill_normal(11), v_new.fill_normal(12);
    options.layout = is_paged ? Layout::kBSHD : Layout::kBHSD;

    std::deque<Mirror> mirrors;
    const auto view_of = [&](HostTensor& tensor) {
        mirrors.emplace_back(tensor);
        return mirrors.back().view();
    };
    const TensorView k = view_of(a.k), v = view_of(a.v), o = view_of(a.o), lse_view = view_of(lse);
    const size_t num_written = mirrors.size();
    const TensorView lengths_view = view_of(lengths);
    std::optional<TensorView> table, k_descale, v_descale;
    AppendOptions append_options;
    options.seqlens_k = append_options.seqlens_k = &lengths_view;
    if (is_paged) options.page_table = &table.emplace(view_of(*a.page_table));
    if (a.k_descale) {
        options.k_descale = &k_descale.emplace(view_of(*a.k_descale));
        options.v_descale = &v_descale.emplace(view_of(*a.v_descale));
    }
    append_options.layout = options.layout;
    append_options.page_table = options.page_table;
    append_options.k_descale = options.k_descale, append_options.v_descale = options.v_descale;
    options.seqlen_new = num_new;
    const AppendParams new_keys =
        make_append_params(view_of(k_new), view_of(v_new), k, v, append_options);
    const Params params = make_params(view_of(a.q), k, v, o, &lse_view, options);
    const Plan plan = Variant{"fa2_cute", Strategy::kSplitKV}.plan(params.problem);
    void* const workspace = arena.take(static_cast<size_t>(plan.workspace_bytes) + 1);

    const HostTensor k_before = a.k, v_before = a.v;
    const auto bytes_after = [&](const auto& call) {
        a.k = k_before, a.v = v_before, a.o.poison(), lse.poison();
        for (size_t i = 0; i < num_written; ++i) mirrors[i].upload();
        call();
        cuda(cudaDeviceSynchronize());
        std::vector<std::byte> bytes;
        for (size_t i = 0; i < num_written; ++i) {
            mirrors[i].download();
            HostTensor& host = mirrors[i].host;
            bytes.insert(bytes.end(), host.storage(), host.storage() + host.storage_bytes());
        }
        return bytes;
    };
    const std::vector<std::byte> expected = bytes_after([&] {
        append(new_keys);
        run(plan, params.problem, params.tensors, workspace, nullptr);
    });
    size_t num_nodes = 0;
    const std::vector<std::byte> got = bytes_after([&] {
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        cuda(cudaStreamCreate(&stream));
        cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        append_and_run(new_keys, plan, params.problem, params.tensors, workspace, stream);
        cuda(cudaStreamEndCapture(stream, &graph));
        cuda(cudaGraphGetNodes(graph, nullptr, &num_nodes));
        cuda(cudaGraphInstantiate(&exec, graph, 0));
        cuda(cudaGraphLaunch(exec, stream));
        cuda(cudaStreamSynchronize(stream));
        cuda(cudaGraphExecDestroy(exec));
        cuda(cudaGraphDestroy(graph));
        cuda(cudaStreamDestroy(stream));
    });
    const std::string what = describe(params.problem, options) + ", " + std::to_string(num_new) +
                             " new, " + std::to_string(plan.num_splits) + " splits";
    CHECK_MESSAGE(got == expected, what, ": other bits");
    CHECK_MESSAGE(num_nodes == num_kernels, what, ": ", num_nodes, " kernels");
    CHECK(arena.is_intact());
    arena.release(mark);
}

}  // namespace

TEST_CASE("any sequence lengths") {  // FA-016, FA-017, FA-023, FA-035
    const int64_t lengths[] = {0,  1,  2,   15,  16,  17,  31,  33,  63,
                               64, 65, 127, 128, 129, 192, 257, 1025};
    for (int64_t seqlen_q : lengths) {
        for (int64_t seqlen_k : lengths) {
            const Sizes sizes{1, 2, 1, seqlen_q, seqlen_k, 40, 40};
            for (DType dtype : kDTypes) check(dense(dtype, sizes), kNoMask);
            check(dense(DType::kFloat32, sizes), kTopLeft);
            check(dense(DType::kFloat32, sizes), kBottomRight);
            check(dense(DType::kBFloat16, sizes), kTopLeft);
            check(dense(DType::kFloat16, sizes), kBottomRight);
        }
    }
}

TEST_CASE("any head dimensions, the same bits every time") {  // FA-014, FA-052
    const std::pair<int64_t, int64_t> dims[] = {
        {1, 1},     {2, 2},       {3, 3},     {7, 7},     {8, 8},     {16, 16},   {24, 24},
        {32, 32},   {33, 33},     {40, 40},   {63, 63},   {64, 64},   {65, 65},   {72, 72},
        {80, 80},   {96, 96},     {112, 112}, {127, 127}, {128, 128}, {129, 129}, {160, 160},
        {192, 192}, {200, 200},   {224, 224}, {256, 256}, {257, 257}, {320, 320}, {512, 512},
        {700, 700}, {1024, 1024}, {8, 16},    {16, 8},    {64, 128},  {128, 64},  {192, 128},
        {128, 1},   {3, 5},       {256, 40},  {33, 250}};
    for (auto [head_dim, head_dim_v] : dims) {
        for (DType dtype : kDTypes) {
            check(dense(dtype, {2, 2, 2, 130, 130, head_dim, head_dim_v}), kNoMask, 4);
            check(dense(dtype, {1, 2, 1, 67, 130, head_dim, head_dim_v}), kBottomRight, 2);
        }
    }
}

TEST_CASE("long rows and many tiles, the same bits every time") {
    const std::pair<int64_t, int64_t> dims[] = {{64, 64},   {96, 96},   {128, 128},
                                                {192, 128}, {192, 192}, {256, 256}};
    for (auto [head_dim, head_dim_v] : dims) {
        for (DType dtype : kDTypes) {
            check(dense(dtype, {1, 2, 1, 513, 1500, head_dim, head_dim_v}), kBottomRight, 4);
            check(dense(dtype, {1, 2, 1, 700, 700, head_dim, head_dim_v}), kNoMask, 4);
        }
    }
}

TEST_CASE("the tiles of large problems") {
    // To a GPU of one SM even these are large.
    const int own = std::exchange(gpu().num_sms, 1);
    for (int64_t head_dim : {64, 96, 128}) {
        for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
            for (int64_t seqlen_q : {130, 1025, 2100, 4200}) {
                check(dense(dtype, {1, 2, 1, seqlen_q, 300, head_dim, head_dim}), kNoMask, 2);
                check(dense(dtype, {1, 2, 1, seqlen_q, 300, head_dim, head_dim}), kTopLeft, 2);
            }
        }
    }
    gpu().num_sms = own;
}

TEST_CASE("a head_dim beyond a kernel's reach is refused by name and value") {
    Arrays a = dense(DType::kFloat32, {1, 1, 1, 4, 4, 257, 257});
    TensorView q = a.q.view(), k = a.k.view(), v = a.v.view(), o = a.o.view();
    for (TensorView* view : {&q, &k, &v, &o}) view->device = {DeviceType::kCuda, 0};
    const Problem p = make_params(q, k, v, o, nullptr, {}).problem;
    for (const char* kernel : {"fa1", "fa2"}) {
        const std::string reason = supports(kernel, p, gpu());
        CHECK(reason.find("head_dim is 257") != std::string::npos);
        CHECK(reason.find("256") != std::string::npos);
        CHECK_THROWS_AS(plan(p, gpu(), kernel), InvalidArgument);
    }
}

TEST_CASE("a launch that fails is an error with names and sizes, and harms nothing") {  // FA-032
    const auto message = [](const auto& call) -> std::string {
        try {
            call();
        } catch (const CudaError& error) {
            return error.what();
        }
        return "no error";
    };
    static const char no_kernel = 0;
    CHECK(cudaLaunchKernel(&no_kernel, dim3(7), dim3(128), nullptr, 4096, nullptr) != cudaSuccess);
    const std::string launch = message([] { check_launch("some_kernel", 7, 128, 4096); });
    CHECK_MESSAGE(launch.find("some_kernel<<<7, 128, 4096>>>: cudaErrorInvalid") == 0, launch);
    const std::string attribute =
        message([] { allow_shared_memory(&no_kernel, "some_kernel", 1 << 20); });
    CHECK_MESSAGE(attribute.find("some_kernel") != std::string::npos, attribute);
    CHECK_MESSAGE(attribute.find("1048576") != std::string::npos, attribute);
    CHECK(cudaGetLastError() == cudaSuccess);
    check(dense(DType::kFloat16, {1, 1, 1, 5, 7, 16, 16}));
}

TEST_CASE("nothing to do is nothing done") {  // FA-016
    for (const Sizes& sizes : {Sizes{0, 2, 2, 5, 7, 16, 16}, Sizes{2, 0, 0, 5, 7, 16, 16},
                               Sizes{2, 2, 2, 0, 7, 16, 16}, Sizes{0, 0, 0, 0, 0, 16, 16}}) {
        check(dense(DType::kFloat32, sizes));
        check(dense(DType::kFloat16, sizes), kTopLeft);
    }
}

TEST_CASE("rows that see no key: O = 0, lse = -inf") {  // FA-017
    Arrays a = dense(DType::kFloat32, {1, 1, 1, 5, 2, 8, 8});
    a.q.fill([](int64_t) { return 0; });
    a.v.fill([](int64_t i) { return 1 + i / 8; });
    check(a, kBottomRight);
    for (auto [seqlen_q, seqlen_k] : {std::pair<int64_t, int64_t>{2048, 1024}, {130, 2}, {64, 1}}) {
        check(dense(DType::kFloat32, {1, 1, 1, seqlen_q, seqlen_k, 64, 64}), kBottomRight);
    }
    // More tiles than run at once: a block goes from one without keys to one with them.
    for (int64_t head_dim : {64, 128, 256}) {
        for (int64_t seqlen_k : {0, 40, 140}) {
            check(dense(DType::kFloat16, {1, 100, 2, 300, seqlen_k, head_dim, head_dim}),
                  kBottomRight);
        }
    }
}

TEST_CASE("layouts: bshd, padding, any stride, any alignment") {  // FA-012
    const int64_t batch = 2, heads = 3, rows = 70, dim = 48;
    using Strides = std::vector<int64_t>;
    const Strides all_strides[] = {
        {heads * rows * dim, rows * dim, dim, 1},             // dense
        {rows * heads * dim, dim, heads * dim, 1},            // bshd memory
        {heads * rows * 64, rows * 64, 64, 1},                // padded, still aligned
        {heads * rows * 51 + 5, rows * 51 + 1, 51, 1},        // padded, unaligned
        {rows * dim, batch * rows * dim, dim, 1},             // heads outermost
        {-heads * rows * dim, -rows * dim, -dim, 1},          // reversed
        {heads * (rows * dim + 3), -rows * dim - 3, dim, 1},  // one axis reversed, unaligned
    };
    const Strides expanded[] = {{0, rows * dim, dim, 1},  // over the batch
                                {heads * rows * dim, 0, dim, 1},
                                {0, 0, dim, 1},
                                {0, 0, 0, 1}};  // every row the same
    const std::vector<int64_t> shape = {batch, heads, rows, dim};
    const auto fill = [](Arrays& a) { a.q.fill_normal(1), a.k.fill_normal(2), a.v.fill_normal(3); };
    for (DType dtype : kDTypes) {
        for (const Strides& s : all_strides) {
            Arrays a{{dtype, shape, s}, {dtype, shape, s}, {dtype, shape, s}, {dtype, shape, s}};
            fill(a);
            check(a, kNoMask);
            check(a, kTopLeft);
        }
        for (const Strides& s : expanded) {
            Arrays a{{dtype, shape, s}, {dtype, shape, s}, {dtype, shape, s}, {dtype, shape}};
            fill(a);
            check(a);
        }
        for (int64_t offset : {1, 2, 3, 4}) {
            for (int which = 0; which < 4; ++which) {  // one array off by a few elements
                const auto make = [&](int i) {
                    return HostTensor(dtype, shape, all_strides[0], i == which ? offset : 0);
                };
                Arrays a{make(0), make(1), make(2), make(3)};
                fill(a);
                check(a, kTopLeft);
            }
        }
        Arrays a{HostTensor(dtype, {batch, rows, heads, dim}),
                 HostTensor(dtype, {batch, 33, heads, dim}),
                 HostTensor(dtype, {batch, 33, heads, dim}),
                 HostTensor(dtype, {batch, rows, heads, dim})};
        fill(a);
        Options options = kBottomRight;
        options.layout = Layout::kBSHD;
        check(a, options);
    }
}

TEST_CASE("query heads share key and value heads") {  // FA-041, FA-077
    for (auto [heads, heads_kv] :
         {std::pair<int64_t, int64_t>{4, 2}, {6, 2}, {8, 1}, {12, 4}, {16, 2}}) {
        for (DType dtype : kDTypes) {
            check(dense(dtype, {2, heads, heads_kv, 65, 130, 64, 64}), kBottomRight);
        }
        Arrays a = dense(DType::kFloat32, {1, heads, heads_kv, 3, 5, 8, 8});
        a.k.fill([](int64_t) { return 0; });
        a.v.fill([](int64_t i) { return i / (5 * 8); });  // head h of v holds h
        check(a);
    }
}

TEST_CASE("softmax_scale: zero, negative, tiny") {
    for (float scale : {0.0f, -0.125f, -1.0f, 1.0f, 1e-30f, 1e-41f}) {
        for (DType dtype : kDTypes) {
            Options options = kTopLeft;
            options.softmax_scale = scale;
            check(dense(dtype, {1, 2, 2, 100, 150, 64, 64}), options);
        }
    }
    // Large and tiny cancel: the scale meets the product, not one factor.
    Arrays a = dense(DType::kFloat32, {1, 1, 1, 20, 30, 16, 16});
    a.q.fill([](int64_t i) { return 1e20f * testing::normal_value(1, i); });
    a.k.fill([](int64_t i) { return 1e15f * testing::normal_value(2, i); });
    Options options;
    options.softmax_scale = 2.5e-36f;
    check(a, options);
}

TEST_CASE("logits far from zero") {
    for (float mean : {-40.0f, 40.0f}) {
        Arrays a = dense(DType::kFloat32, {1, 2, 2, 70, 200, 64, 64});
        a.q.fill([](int64_t) { return 1; });
        a.k.fill([=](int64_t i) { return (mean + testing::normal_value(2, i)) / 8; });
        check(a, kBottomRight, 1, std::fabs(mean));
    }
}

// Logits around one value for 24 keys, then another, `leap` times 4 or 7 away; 0: around -300.
void fill_leaping(Arrays& a, int64_t head_dim, double leap) {
    a.q.fill([](int64_t) { return 1; });
    a.k.fill([=](int64_t i) {
        const int64_t block = i / head_dim / 24;
        const double logit = leap == 0 ? -300 : leap * (block * 7 % 11 - 5);
        return (logit + testing::normal_value(2, i)) / std::sqrt(head_dim);
    });
}

// Either way; and, causal, from no logit at all.
TEST_CASE("logits that leap by hundreds between blocks of keys") {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (int64_t head_dim : {64, 96, 128, 192, 256}) {
            for (double leap : {60, 0}) {
                Arrays a = dense(dtype, {1, 2, 2, 300, 700, head_dim, head_dim});
                fill_leaping(a, head_dim, leap);
                Options windowed;
                windowed.window_left = 200, windowed.window_right = 20;
                for (const Options& options : {kNoMask, kTopLeft, windowed}) {
                    check(a, options, 1, 300);
                }
            }
        }
    }
}

TEST_CASE("NaN and inf reach exactly the rows that see them") {  // FA-009, FA-050
    for (const Options& options : {kNoMask, kTopLeft, kBottomRight}) {
        for (DType dtype : kDTypes) {
            const auto with = [&](auto change) {
                for (int64_t dim : {40, 300}) {
                    Arrays a = dense(dtype, {1, 2, 2, 70, 90, dim, dim});
                    change(a);
                    check(a, options);
                }
            };
            for (float bad : {kNaN, kInf, -kInf}) {
                with([=](Arrays& a) { a.q.set({0, 1, 3, 5}, bad); });
                for (int64_t key : {0, 30, 67, 89}) {
                    with([=](Arrays& a) { a.k.set({0, 0, key, 7}, bad); });
                    with([=](Arrays& a) { a.v.set({0, 1, key, 9}, bad); });
                }
            }
            // One logit of -inf for every query, then of +inf; then nothing but -inf.
            for (float bad : {-kInf, kInf}) {
                with([=](Arrays& a) {
                    for (int64_t i = 0; i < 70; ++i) a.q.set({0, 0, i, 0}, 1);
                    a.k.set({0, 0, 20, 0}, bad);
                });
            }
            with([=](Arrays& a) {
                for (int64_t i = 0; i < 70; ++i) a.q.set({0, 0, i, 0}, 1);
                for (int64_t j = 0; j < 90; ++j) a.k.set({0, 0, j, 0}, -kInf);
            });
            // A prefix longer than any block of keys: -inf first, finite later.
            with([=](Arrays& a) {
                for (int64_t i = 0; i < 70; ++i) a.q.set({0, 0, i, 0}, 1);
                for (int64_t j = 0; j < 66; ++j) a.k.set({0, 0, j, 0}, -kInf);
            });
        }
    }
    Arrays a = dense(DType::kFloat32, {1, 1, 1, 40, 700, 64, 64});
    for (int64_t i = 0; i < 40; ++i) a.q.set({0, 0, i, 0}, 1);
    for (int64_t j = 0; j < 600; ++j) a.k.set({0, 0, j, 0}, -kInf);
    check(a);
    // Every key past the diagonal is NaN: the rows before it must not notice.
    for (int64_t dim : {64, 96, 128, 192, 256, 320, 512, 1024}) {
        for (DType dtype : {DType::kFloat32, DType::kFloat16}) {
            Arrays b = dense(dtype, {1, 1, 1, 300, 300, dim, dim});
            for (int64_t j = 150; j < 300; ++j) {
                for (int64_t d = 0; d < dim; ++d)
                    b.k.set({0, 0, j, d}, kNaN), b.v.set({0, 0, j, d}, kNaN);
            }
            check(b, kTopLeft);
        }
    }
}

TEST_CASE("few queries of wide heads: the keys are split") {
    for (int64_t dim : {257, 384, 512, 700, 1024}) {
        for (DType dtype : kDTypes) {
            for (int64_t seqlen_q : {1, 9, 17, 33}) {
                check(dense(dtype, {1, 2, 1, seqlen_q, 255, dim, dim}), kNoMask);
                check(dense(dtype, {1, 2, 1, seqlen_q, 257, dim, dim}), kBottomRight);
                check(dense(dtype, {1, 2, 1, seqlen_q, 1100, dim, dim}), kTopLeft, 2);
            }
        }
    }
}

TEST_CASE("without an lse the output is the same") {
    for (DType dtype : kDTypes) {
        Arrays a = dense(dtype, {1, 2, 2, 100, 100, 64, 64});
        const size_t mark = arena.mark();
        HostTensor lse(DType::kFloat32, {1, 2, 100});
        const Mirror q(a.q), k(a.k), v(a.v), o(a.o), lse_mirror(lse);
        const TensorView lse_view = lse_mirror.view();
        const Params with = make_params(q.view(), k.view(), v.view(), o.view(), &lse_view, {});
        const Params without = make_params(q.view(), k.view(), v.view(), o.view(), nullptr, {});
        for (const Variant& kernel : cuda_kernels()) {
            if (!kernel.fits(with.problem)) continue;
            CHECK_MESSAGE(run_kernel(kernel, with, o, &lse_mirror).o ==
                              run_kernel(kernel, without, o, nullptr).o,
                          kernel.name());
        }
        arena.release(mark);
    }
}

TEST_CASE("window, softcap, bias, mask and lengths, alone and together") {
    const std::pair<int64_t, int64_t> dims[] = {{64, 64},   {40, 40},   {96, 96},   {128, 128},
                                                {192, 128}, {192, 192}, {256, 256}, {320, 320}};
    // Bit 0: window, 1: softcap, 2: bias, 3: mask, 4: seqlens_k.
    for (int which = 1; which < 32; ++which) {
        for (DType dtype : kDTypes) {
            for (auto [dim, dim_v] : dims) {
                const Sizes sizes{3, 4, 2, which % 2 == 0 ? 3 : 70, 150, dim, dim_v};
                Arrays a = dense(dtype, sizes, static_cast<uint64_t>(which));
                Options options = which % 3 == 0 ? kBottomRight : kNoMask;
                if (which & 1) options.window_left = 40, options.window_right = 20;
                if (which & 2) options.softcap = 1.5f;
                const std::vector<int64_t> shape = {3, 1, sizes.seqlen_q, sizes.seqlen_k};
                if (which & 4) {
                    a.bias.emplace(which & 1 ? DType::kFloat32 : dtype, shape);
                    a.bias->fill_normal(7);
                }
                if (which & 8) {
                    a.mask.emplace(DType::kBool, shape);
                    auto* const mask = static_cast<uint8_t*>(a.mask->data());
                    for (int64_t i = 0; i < a.mask->numel(); ++i) {
                        mask[i] = i / sizes.seqlen_k % 7 != 2 && i % 5 != 0;
                    }
                }
                if (which & 16) {
                    a.seqlens_k.emplace(DType::kInt32, std::vector<int64_t>{3});
                    auto* const lengths = static_cast<int32_t*>(a.seqlens_k->data());
                    lengths[0] = 97, lengths[1] = 0, lengths[2] = 150;
                }
                check(std::move(a), options, 2);
            }
        }
    }
}

TEST_CASE("a cache in pages: every tile, several splits, what is nobody's is NaN") {  // FA-009
    for (DType dtype : kDTypes) {
        for (int64_t dim : {64, 77, 96, 128, 192, 256}) {
            for (int64_t page_size : {16, dim == 128 ? 512 : 32}) {
                for (int64_t seqlen_q : {1, 3, 40}) {
                    const Sizes sizes = {3, 8, 2, seqlen_q, 2048, dim, dim};
                    check(paged(dtype, sizes, page_size, {1041, 513, 0}), in_pages(), 2);
                    check(paged(dtype, sizes, page_size, {700, 16, 1}), in_pages(100));
                }
            }
        }
        Arrays a = paged(dtype, {2, 6, 2, 5, 1024, 64, 80}, 16, {1000, 37});
        a.bias.emplace(dtype, std::vector<int64_t>{2, 1, 5, 1024});
        a.bias->fill_normal(7);
        Options options = in_pages();
        options.softcap = 20;
        for (int64_t num_splits : {0, 1, 2, 7}) {
            options.num_splits = num_splits;
            check(a, options);
        }
    }
}

TEST_CASE("keys and values in fp8: every tile, whole and in pages, what is nobody's is NaN") {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (int64_t dim : {8, 64, 77, 96, 128, 192, 256}) {
            for (int64_t seqlen_q : {1, 3, 40}) {
                const Sizes sizes = {3, 8, 2, seqlen_q, 2048, dim, dim};
                check(in_fp8(paged(dtype, sizes, 16, {1041, 513, 0}), 3, 2), in_pages(), 2);
                check(in_fp8(paged(dtype, sizes, 32, {700, 16, 1}), 3, 2), in_pages(100));
                Arrays a = in_fp8(dense(dtype, sizes), 3, 2);
                check(a, kBottomRight, 2);
                a.seqlens_k = ints({3}, {2048, 77, 0});
                Options options;
                options.softcap = 2;
                check(a, options);
            }
        }
        Arrays a = in_fp8(paged(dtype, {2, 6, 2, 5, 1024, 64, 80}, 16, {1000, 37}), 2, 2);
        a.bias.emplace(dtype, std::vector<int64_t>{2, 1, 5, 1024});
        a.bias->fill_normal(7);
        for (int64_t num_splits : {0, 1, 2, 7}) {
            Options options = in_pages();
            options.num_splits = num_splits;
            check(a, options);
        }
        // Codes of NaN that some rows see, in the first block, inside and in the last.
        for (int64_t dim : {64, 128}) {
            for (int64_t seqlen_q : {7, 50}) {
                Arrays b = in_fp8(dense(dtype, {1, 4, 2, seqlen_q, 300, dim, dim}), 1, 2);
                for (int64_t key : {0, 270, 296}) {
                    b.k.set({0, 0, key, dim - 1}, kNaN);
                    b.v.set({0, 1, key, 5}, kNaN);
                }
                Options options = kBottomRight;
                options.window_left = 3;
                check(b, options);
            }
        }
    }
}

TEST_CASE("the number of splits as asked for") {  // FA-037
    for (int64_t num_splits : {1, 2, 3, 5, 64}) {
        Options options = kBottomRight;
        options.num_splits = num_splits;
        check(dense(DType::kFloat16, {3, 4, 2, 5, 4096, 64, 64}), options);
        check(dense(DType::kBFloat16, {1, 8, 2, 1, 1000, 128, 128}), options);
    }
}

TEST_CASE("append on the GPU is append on the CPU") {  // FA-030
    for (DType dtype : kDTypes) {
        for (bool is_paged : {false, true}) {
            for (int64_t head_dim : {64, 30, 128}) {
                for (int64_t rotary_dim : {0, 16, 30}) {
                    for (bool interleaved : {false, true}) {
                        check_append(dtype, dtype, is_paged, head_dim, rotary_dim, interleaved);
                        if (dtype == DType::kFloat32) continue;
                        check_append(dtype, DType::kFloat8E4M3, is_paged, head_dim, rotary_dim,
                                     interleaved);
                    }
                }
            }
        }
    }
}

TEST_CASE("new keys in attention's own launch") {  // FA-030
    Options top_left_window = kTopLeft;  // no query sees a new key, but for the empty sequence
    top_left_window.window_left = 3;
    for (Options options : {kNoMask, kBottomRight, top_left_window}) {
        for (int64_t num_splits : {0, 1, 3, 64}) {
            options.num_splits = num_splits;
            for (bool is_paged : {false, true}) {
                for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
                    for (DType dtype_cache : {dtype, DType::kFloat8E4M3}) {
                        for (int64_t num_new : {1, 4}) {
                            check_append_and_run(dtype, dtype_cache, num_new, is_paged, options, 1);
                        }
                        check_append_and_run(dtype, dtype_cache, 40, is_paged, options, 2);
                    }
                }
            }
        }
    }
    check_append_and_run(DType::kFloat32, DType::kFloat32, 1, false, kBottomRight, 3);
}

TEST_CASE("tiles for GPUs with less shared memory") {  // FA-042: sm_86 and sm_89, sm_80
    const int64_t own = gpu().smem_per_block;
    for (int64_t kilobytes : {99, 163}) {
        gpu().smem_per_block = kilobytes * 1024;
        for (int64_t dim : {64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024}) {
            for (DType dtype : kDTypes) {
                check(dense(dtype, {1, 4, 2, 70, 150, dim, dim}), kBottomRight);
                check(dense(dtype, {1, 4, 2, 1, 600, dim, dim}), kNoMask);
            }
        }
    }
    gpu().smem_per_block = own;
}

TEST_CASE("a small problem of every kernel") {  // for compute-sanitizer
    for (int64_t dim : {64, 320, 520}) {
        for (DType dtype : kDTypes) {
            check(dense(dtype, {1, 2, 1, 70, 140, dim, dim}), kBottomRight);
            for (int64_t seqlen_q : {20, 70}) {  // one group of sm90's split_kv, and two
                Arrays cache = dense(dtype, {2, 2, 1, seqlen_q, 600, dim, dim});
                cache.seqlens_k.emplace(DType::kInt32, std::vector<int64_t>{2});
                auto* const lengths = static_cast<int32_t*>(cache.seqlens_k->data());
                lengths[0] = 533, lengths[1] = 0;
                check(std::move(cache), kNoMask);
            }
            Arrays a = dense(dtype, {2, 2, 1, 3, 600, dim - 1, dim - 1});
            a.bias.emplace(dtype, std::vector<int64_t>{2, 1, 3, 600});
            a.bias->fill_normal(7);
            a.seqlens_k.emplace(DType::kInt32, std::vector<int64_t>{2});
            auto* const lengths = static_cast<int32_t*>(a.seqlens_k->data());
            lengths[0] = 533, lengths[1] = 0;
            Options options;
            options.window_left = 560;
            options.softcap = 20;
            check(std::move(a), options);
        }
    }
    for (int64_t seqlen_q : {1, 20}) {
        for (DType dtype : {DType::kFloat16, DType::kFloat32}) {
            check(paged(dtype, {2, 4, 1, seqlen_q, 640, 64, 64}, 16, {530, 0}), in_pages());
        }
    }
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        check(in_fp8(paged(dtype, {2, 4, 1, 20, 640, 64, 64}, 16, {530, 0}), 2, 1), in_pages());
        check(in_fp8(dense(dtype, {2, 2, 1, 3, 600, 63, 63}), 2, 1), kBottomRight);
    }
    check_append(DType::kBFloat16, DType::kBFloat16, /*is_paged=*/true, 64, 32,
                 /*interleaved=*/false);
    check_append(DType::kFloat32, DType::kFloat32, /*is_paged=*/false, 64, 0,
                 /*interleaved=*/false);
    check_append(DType::kFloat16, DType::kFloat8E4M3, /*is_paged=*/true, 64, 32,
                 /*interleaved=*/false);
    check_append_and_run(DType::kFloat16, DType::kFloat16, 4, /*is_paged=*/true, kBottomRight, 1);
}

TEST_CASE("more heads than a y or z axis of a grid can hold") {  // FA-007
    check(dense(DType::kFloat16, {70000, 1, 1, 1, 2, 8, 8}));
    check(dense(DType::kFloat32, {3, 30000, 30000, 2, 1, 4, 4}), kTopLeft);
}

TEST_CASE("strides beyond 2^31") {  // FA-007, FA-026
    // Two batches more than 2^31 elements apart: q, k and v in one buffer, which holds little else,
    // and o in another.
    constexpr int64_t kStride = (int64_t{1} << 31) + 8;
    constexpr size_t kBytes = (static_cast<size_t>(kStride) + (1 << 20)) * 2;
    size_t free_bytes = 0, total_bytes = 0;
    cuda(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (free_bytes < 2 * kBytes + (size_t{1} << 30)) {
        MESSAGE("not tested: needs 10 GB of free GPU memory");
        return;
    }
    std::byte *inputs = nullptr, *output = nullptr;
    cuda(cudaMalloc(reinterpret_cast<void**>(&inputs), kBytes));
    cuda(cudaMalloc(reinterpret_cast<void**>(&output), kBytes));
    const int64_t rows = 70, dim = 64, size = rows * dim;
    Arrays a = dense(DType::kFloat16, {2, 1, 1, rows, rows, dim, dim});
    watchdog.begin("strides beyond 2^31");
    const auto place = [&](HostTensor& host, std::byte* data) {
        TensorView view = host.view();
        view.data = data;
        view.device = {DeviceType::kCuda, 0};
        view.strides[0] = kStride;
        return view;
    };
    const TensorView q = place(a.q, inputs), k = place(a.k, inputs + 2 * size);
    const TensorView v = place(a.v, inputs + 4 * size), o = place(a.o, output);
    const auto copy = [&](const TensorView& view, HostTensor& host, bool to_device) {
        for (int64_t b = 0; b < 2; ++b) {
            auto* const device = static_cast<std::byte*>(view.data) + b * kStride * 2;
            auto* const local = static_cast<std::byte*>(host.data()) + b * size * 2;
            cuda(to_device ? cudaMemcpy(device, local, size * 2, cudaMemcpyHostToDevice)
                           : cudaMemcpy(local, device, size * 2, cudaMemcpyDeviceToHost));
        }
    };
    copy(q, a.q, true), copy(k, a.k, true), copy(v, a.v, true);

    const Params params = make_params(q, k, v, o, nullptr, kTopLeft);
    Tensors host = params.tensors;
    host.q_ptr = a.q.data(), host.k_ptr = a.k.data(), host.v_ptr = a.v.data();
    host.q_batch_stride = host.k_batch_stride = host.v_batch_stride = size;
    std::vector<double> expected(2 * size);
    testing::reference_attention(params.problem, host, expected.data(), nullptr, 1);
    for (const Variant& kernel : cuda_kernels()) {
        if (!kernel.fits(params.problem)) continue;
        a.o.poison();
        copy(o, a.o, true);
        const Plan chosen = kernel.plan(params.problem);
        const size_t mark = arena.mark();
        run(chosen, params.problem, params.tensors,
            arena.take(static_cast<size_t>(chosen.workspace_bytes)), nullptr);
        cuda(cudaDeviceSynchronize());
        copy(o, a.o, false);
        arena.release(mark);
        const Comparison in_o = testing::compare(a.o.data(), DType::kFloat16, {2, 1, rows, dim},
                                                 {size, size, dim, 1}, expected.data());
        CHECK_MESSAGE(in_o.passed(testing::output_tolerance(params.problem, in_o.max_expected)),
                      kernel.name(), ": ", in_o.describe());
    }
    cuda(cudaFree(inputs));
    cuda(cudaFree(output));
}

namespace {

// What the stream, graph and thread tests share: a problem on the device and its right answer.
struct Prepared {
    Prepared(DType dtype, const Sizes& sizes, const Options& options)
        : a(dense(dtype, sizes)),
          q(a.q),
          k(a.k),
          v(a.v),
          o(a.o),
          params(make_params(q.view(), k.view(), v.view(), o.view(), nullptr, options)) {}
    Arrays a;
    Mirror q, k, v, o;
    Params params;
};

}  // namespace

TEST_CASE("the stream given is the stream used, and nobody waits") {  // FA-006
    cudaStream_t stream = nullptr;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const Variant& kernel : cuda_kernels()) {
        const size_t mark = arena.mark();
        Prepared work(DType::kFloat16,
                      {1, 2, 2, 200, 200, kernel.head_dim(64), kernel.head_dim(64)}, kTopLeft);
        watchdog.begin("stream test of " + kernel.name());
        if (!kernel.fits(work.params.problem)) continue;  // not built
        const Result expected = run_kernel(kernel, work.params, work.o, nullptr);
        const Plan chosen = kernel.plan(work.params.problem);
        void* const workspace = arena.take(static_cast<size_t>(chosen.workspace_bytes));
        work.a.o.poison(), work.o.upload();
        cuda(cudaMemset(work.k.storage, 0xff, work.a.k.storage_bytes()));
        cuda(cudaDeviceSynchronize());

        // K arrives late on the stream: a kernel elsewhere would see NaN.
        std::atomic<bool> slept{false};
        cuda(cudaLaunchHostFunc(
            stream,
            [](void* flag) {
                std::this_thread::sleep_for(std::chrono::milliseconds(50));
                *static_cast<std::atomic<bool>*>(flag) = true;
            },
            &slept));
        cuda(cudaMemcpyAsync(work.k.storage, work.a.k.storage(), work.a.k.storage_bytes(),
                             cudaMemcpyHostToDevice, stream));
        run(chosen, work.params.problem, work.params.tensors, workspace, stream);
        cuda(cudaStreamSynchronize(stream));
        CHECK(slept);
        work.o.download();
        CHECK_MESSAGE(std::memcmp(work.a.o.storage(), expected.o.data(), expected.o.size()) == 0,
                      kernel.name());

        // And with nothing to copy the call comes back while the stream still sleeps.
        slept = false;
        cuda(cudaLaunchHostFunc(
            stream,
            [](void* flag) {
                std::this_thread::sleep_for(std::chrono::milliseconds(200));
                *static_cast<std::atomic<bool>*>(flag) = true;
            },
            &slept));
        run(chosen, work.params.problem, work.params.tensors, workspace, stream);
        CHECK_MESSAGE(!slept, kernel.name(), " waited for the stream");
        cuda(cudaStreamSynchronize(stream));
        arena.release(mark);
    }
    cuda(cudaStreamDestroy(stream));
}

TEST_CASE("a captured graph follows new inputs") {  // FA-028
    cudaStream_t stream = nullptr;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const Variant& kernel : cuda_kernels()) {
        const size_t mark = arena.mark();
        Prepared work(DType::kFloat16,
                      {1, 2, 2, 130, 200, kernel.head_dim(128), kernel.head_dim(128)},
                      kBottomRight);
        watchdog.begin("graph test of " + kernel.name());
        if (!kernel.fits(work.params.problem)) continue;
        const Plan chosen = kernel.plan(work.params.problem);
        void* const workspace = arena.take(static_cast<size_t>(chosen.workspace_bytes));
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        run(chosen, work.params.problem, work.params.tensors, workspace, stream);
        cuda(cudaStreamEndCapture(stream, &graph));
        cuda(cudaGraphInstantiate(&executable, graph, 0));
        for (uint64_t seed = 10; seed < 13; ++seed) {
            work.a.q.fill_normal(seed), work.q.upload();
            work.a.v.fill_normal(seed + 100), work.v.upload();
            const Result expected = run_kernel(kernel, work.params, work.o, nullptr);
            work.a.o.poison(), work.o.upload();
            cuda(cudaDeviceSynchronize());
            cuda(cudaGraphLaunch(executable, stream));
            cuda(cudaStreamSynchronize(stream));
            work.o.download();
            CHECK_MESSAGE(
                std::memcmp(work.a.o.storage(), expected.o.data(), expected.o.size()) == 0,
                kernel.name());
        }
        cuda(cudaGraphExecDestroy(executable));
        cuda(cudaGraphDestroy(graph));
        arena.release(mark);
    }
    cuda(cudaStreamDestroy(stream));
}

TEST_CASE("threads with kernels of different sizes at once") {  // FA-043, FA-048
    const size_t mark = arena.mark();
    watchdog.begin("thread test");
    struct Job {
        Job(const Variant& kernel, int64_t head_dim)
            : work(DType::kFloat16,
                   {1, 2, 2, 150, 150, kernel.head_dim(head_dim), kernel.head_dim(head_dim)},
                   kTopLeft),
              chosen(kernel.plan(work.params.problem)),
              workspace(arena.take(static_cast<size_t>(chosen.workspace_bytes))),
              expected(run_kernel(kernel, work.params, work.o, nullptr)) {
            cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        }
        Prepared work;
        Plan chosen;
        void* workspace;
        Result expected;
        cudaStream_t stream = nullptr;
    };
    std::deque<Job> jobs;
    for (const Variant& kernel : cuda_kernels()) {
        for (int64_t head_dim : {64, 256}) {
            const int64_t dim = kernel.head_dim(head_dim);
            const Prepared probe(DType::kFloat16, {1, 2, 2, 150, 150, dim, dim}, kTopLeft);
            if (kernel.fits(probe.params.problem)) jobs.emplace_back(kernel, head_dim);
        }
    }
    std::atomic<int> errors{0};
    std::vector<std::thread> threads;
    for (Job& job : jobs) {
        threads.emplace_back([&job, &errors] {
            try {
                for (int repeat = 0; repeat < 50; ++repeat) {
                    run(job.chosen, job.work.params.problem, job.work.params.tensors, job.workspace,
                        job.stream);
                }
                cuda(cudaStreamSynchronize(job.stream));
            } catch (const std::exception& error) {
                std::fprintf(stderr, "%s: %s\n", job.chosen.kernel, error.what());
                ++errors;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(errors == 0);
    for (Job& job : jobs) {
        job.work.o.download();
        CHECK_MESSAGE(
            std::memcmp(job.work.a.o.storage(), job.expected.o.data(), job.expected.o.size()) == 0,
            job.chosen.kernel);
        cuda(cudaStreamDestroy(job.stream));
    }
    arena.release(mark);
}

// ---- Hopper's kernels at the edges of their tiles, again and again

namespace {

// What TMA, barriers and warp groups that wait for each other could get wrong once in a while.
struct EdgeTile {
    Variant kernel;
    int64_t head_dim, head_dim_v, block_m, block_n;
    int packed_heads = 1, num_splits = 0;
    int64_t most_keys = std::numeric_limits<int64_t>::max();

    // With this tile, whichever the planner would take.
    Plan plan(const Problem& p) const {
        Plan chosen = kernel.plan(p);
        if (kernel.strategy != Strategy::kSplitD) {
            chosen.tile.block_m = static_cast<int>(block_m);
            chosen.tile.packed_heads = packed_heads;
        }
        if (kernel.strategy == Strategy::kSplitQ) {
            chosen.tile.block_n = static_cast<int>(block_n);
            chosen.workspace_bytes =
                sm90::has_counter(chosen.tile, p) ? sm90::kTileCounterBytes : 0;
        }
        return chosen;
    }
};

std::vector<EdgeTile> edge_tiles() {
    std::vector<EdgeTile> tiles;
    for (const sm90::HeadDims& dims : sm90::kHeadDims) {
        std::vector<std::pair<int64_t, int64_t>> seen;
        for (auto* config_of : {sm90::two_groups, sm90::most_groups, sm90::twins, sm90::at_once}) {
            const sm90::Config config = config_of(dims.qk, dims.v);
            const std::pair<int64_t, int64_t> blocks(config.block_m(), config.block_n);
            if (std::find(seen.begin(), seen.end(), blocks) != seen.end()) continue;
            seen.push_back(blocks);
            for (int packed_heads : {1, 4, 16}) {
                tiles.push_back({{"sm90", Strategy::kSplitQ},
                                 dims.qk,
                                 dims.v,
                                 blocks.first,
                                 blocks.second,
                                 packed_heads});
                if (config.at_once) tiles.back().most_keys = sm90::kAtOnceKeys;
            }
        }
    }
    for (const sm90::HeadDims& dims : sm90::kHeadDims) {
        for (auto* config_of : {sm90::one_group, sm90::two_groups}) {
            const sm90::Config config = config_of(dims.qk, dims.v);
            for (auto [packed_heads, num_splits] : {std::pair{1, 3}, {4, 1}, {16, 5}}) {
                tiles.push_back({{"sm90", Strategy::kSplitKV},
                                 dims.qk,
                                 dims.v,
                                 config.block_m(),
                                 config.block_n,
                                 packed_heads,
                                 num_splits});
            }
        }
    }
    for (int64_t head_dim : sm90_split_d::kHeadDims) {
        tiles.push_back({{"sm90", Strategy::kSplitD},
                         head_dim,
                         head_dim,
                         sm90_split_d::kBlockM,
                         sm90_split_d::kBlockN});
    }
    return tiles;
}

// The first run gives what the oracle says, all others the same bits, each over NaN.
void check_repeats(const EdgeTile& tile, DType dtype, Sizes sizes, Options options, int repeats,
                   double leap = -1) {
    const size_t mark = arena.mark();
    sizes.seqlen_k = std::min(sizes.seqlen_k, tile.most_keys);
    // Of the problem, too: unless it asks for a number, the kernel makes no part of one block.
    options.num_splits = tile.num_splits;
    Arrays a = dense(dtype, sizes);
    if (leap >= 0) fill_leaping(a, sizes.head_dim, leap);
    HostTensor lse(DType::kFloat32, {sizes.batch, sizes.heads, sizes.seqlen_q});
    const Mirror q(a.q), k(a.k), v(a.v), o(a.o), lse_mirror(lse);
    const TensorView lse_view = lse_mirror.view();
    const Params params = make_params(q.view(), k.view(), v.view(), o.view(), &lse_view, options);
    const Problem& p = params.problem;
    if (!tile.kernel.fits(p)) return arena.release(mark);
    const Plan chosen = tile.plan(p);
    if (chosen.tile.head_dim != tile.head_dim) return arena.release(mark);  // it is not built
    const std::string what = tile.kernel.name() + " in tiles of " + std::to_string(tile.block_m) +
                             " x " + std::to_string(tile.block_n) + ", packed " +
                             std::to_string(tile.packed_heads) + ", " +
                             std::to_string(chosen.num_splits) + " parts, " + describe(p, options);
    watchdog.begin(what);

    void* const workspace = arena.take(static_cast<size_t>(chosen.workspace_bytes));
    const auto launch = [&] {
        cuda(cudaMemsetAsync(o.storage, 0xff, a.o.storage_bytes()));
        cuda(cudaMemsetAsync(lse_mirror.storage, 0xff, lse.storage_bytes()));
        run(chosen, p, params.tensors, workspace, nullptr);
    };
    launch();
    o.download(), lse_mirror.download();
    CHECK_MESSAGE(a.o.padding_is_intact(), what, " wrote outside of out");
    const Mirror first_o(a.o), first_lse(lse);

    const auto rows = static_cast<size_t>(sizes.batch * sizes.heads * sizes.seqlen_q);
    std::vector<double> o_expected(rows * static_cast<size_t>(sizes.head_dim_v));
    std::vector<double> lse_expected(rows);
    const auto on_gpu = [](const std::vector<double>& x) {
        return static_cast<double*>(arena.take(x.size() * sizeof(double)));
    };
    const auto fetch = [](std::vector<double>& x, const double* from) {
        cuda(cudaMemcpy(x.data(), from, x.size() * sizeof(double), cudaMemcpyDeviceToHost));
    };
    double *const o_oracle = on_gpu(o_expected), *const lse_oracle = on_gpu(lse_expected);
    testing::reference_attention_gpu(p, params.tensors, o_oracle, lse_oracle, nullptr);
    fetch(o_expected, o_oracle), fetch(lse_expected, lse_oracle);
    check_result(what, params, a.o, lse, o_expected, lse_expected, leap < 0 ? 1 : 300);

    std::vector<unsigned> differing(static_cast<size_t>(repeats));  // bytes, of each run
    const size_t bytes = differing.size() * sizeof(unsigned);
    auto* const counts = static_cast<unsigned*>(arena.take(bytes));
    cuda(cudaMemset(counts, 0, bytes));
    const auto count_in = [](const Mirror& x, const Mirror& first, unsigned* count) {
        testing::count_differences_gpu(
            x.storage, first.storage, static_cast<int64_t>(x.host.storage_bytes()), count, nullptr);
    };
    for (int i = 0; i < repeats; ++i) {
        launch();
        count_in(o, first_o, counts + i), count_in(lse_mirror, first_lse, counts + i);
    }
    cuda(cudaMemcpy(differing.data(), counts, bytes, cudaMemcpyDeviceToHost));
    const auto wrong = std::find_if(differing.begin(), differing.end(), [](auto n) { return n; });
    if (wrong != differing.end()) {
        FAIL_CHECK(what << ": run " << wrong - differing.begin() << " of " << repeats << " gave "
                        << *wrong << " other bytes");
    }
    CHECK_MESSAGE(arena.is_intact(), what, " wrote past the end of an array");
    arena.release(mark);
}

}  // namespace

// A step of sm90 guesses from the one before: by 3 it moves, by 60 it is lost.
TEST_CASE("Hopper's tiles where logits leap") {
    for (const EdgeTile& tile : edge_tiles()) {
        for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
            for (double leap : {3, 60, 0}) {
                for (const Options& options : {kNoMask, kTopLeft, kBottomRight}) {
                    const Sizes sizes = {2,
                                         2 * tile.packed_heads,
                                         1,
                                         (2 * tile.block_m - 21) / tile.packed_heads,
                                         5 * tile.block_n + 30,
                                         tile.head_dim,
                                         tile.head_dim_v};
                    check_repeats(tile, dtype, sizes, options, 2, leap);
                }
            }
        }
    }
}

TEST_CASE("Hopper's tiles with a window or softcap, heads packed or not") {
    Options window = kBottomRight, capped = kTopLeft, both = kNoMask;
    window.window_left = 37;
    capped.softcap = 5;
    both.window_left = 70, both.window_right = 9, both.softcap = 20;
    for (const EdgeTile& tile : edge_tiles()) {
        const sm90::Config two =
            sm90::two_groups(static_cast<int>(tile.head_dim), static_cast<int>(tile.head_dim_v));
        if (tile.block_m != two.block_m() || tile.block_n != two.block_n) continue;
        for (const Options& options : {window, capped, both}) {
            for (int64_t more : {0, 1, 50}) {
                const int64_t seqlen_q = tile.block_m / tile.packed_heads + more;
                check_repeats(tile, more == 0 ? DType::kFloat16 : DType::kBFloat16,
                              {2, 2 * tile.packed_heads, 2, seqlen_q, 3 * tile.block_n + more,
                               tile.head_dim, tile.head_dim_v},
                              options, 2);
            }
        }
    }
}

TEST_CASE("Hopper's kernels at the edges of their tiles: the same bits 10,000 times") {
    const char* const asked = std::getenv("FA101_REPEATS");  // of all shapes of sm90 together
    const int repeats = asked != nullptr ? std::atoi(asked) : 10000;
    const std::vector<EdgeTile> tiles = edge_tiles();
    const auto num_sm90 = std::count_if(tiles.begin(), tiles.end(), [](const EdgeTile& tile) {
        return tile.kernel.strategy == Strategy::kSplitQ;
    });
    std::mt19937_64 random(1);
    const auto draw = [&](int64_t first, int64_t last) {
        return first + static_cast<int64_t>(random() % static_cast<uint64_t>(last - first + 1));
    };
    constexpr int kShapes =
        9;  // of a tile: one query less, as many and one more, and keys likewise
    for (size_t t = 0; t < tiles.size(); ++t) {
        const EdgeTile& tile = tiles[t];
        const bool is_sm90 = tile.kernel.strategy == Strategy::kSplitQ;
        const int each = repeats / static_cast<int>(num_sm90 * kShapes) + 1;
        for (int i = 0; i < kShapes; ++i) {
            const int64_t seqlen_q = draw(1, 3) * tile.block_m / tile.packed_heads + i / 3 - 1;
            const int64_t seqlen_k = draw(1, 5) * tile.block_n + i % 3 - 1;
            int64_t packs = draw(1, 4);
            if (static_cast<size_t>(i) == t % kShapes) {  // several tiles a block, of two an SM
                const int64_t rows = seqlen_q * tile.packed_heads;
                const int64_t tiles_of_pack = (rows + tile.block_m - 1) / tile.block_m;
                packs = 5 * gpu().num_sms / 2 / tiles_of_pack + 1;
            }
            const DType dtype = draw(0, 1) == 0 ? DType::kFloat16 : DType::kBFloat16;
            const Options* const masks[] = {&kNoMask, &kTopLeft, &kBottomRight};
            check_repeats(tile, dtype,
                          {1, packs * tile.packed_heads, 1, seqlen_q, seqlen_k, tile.head_dim,
                           tile.head_dim_v},
                          *masks[draw(0, 2)], is_sm90 ? each : each / 4 + 1);
        }
    }
}

// ---- Parts of the keys, merged in the launch that makes them
// --------------------------------------

namespace {

const Variant kSplitKV = {"fa2_cute", Strategy::kSplitKV};

// A cache of which `lengths` keys are there, what split_kv leaves of it, and memory for the parts.
struct Decoding {
    Decoding(const Sizes& sizes, const std::vector<int32_t>& lengths, Options options)
        : a(dense(DType::kBFloat16, sizes)),
          seqlens(ints({sizes.batch}, lengths)),
          lse(DType::kFloat32, {sizes.batch, sizes.heads, sizes.seqlen_q}),
          q(a.q),
          k(a.k),
          v(a.v),
          o(a.o),
          seqlens_mirror(seqlens),
          lse_mirror(lse) {
        const TensorView seqlens_view = seqlens_mirror.view(), lse_view = lse_mirror.view();
        options.seqlens_k = &seqlens_view;
        params = make_params(q.view(), k.view(), v.view(), o.view(), &lse_view, options);
        chosen = kSplitKV.plan(params.problem);
        workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
        workspace = arena.take(workspace_bytes);
    }
    void set_lengths(const std::vector<int32_t>& lengths) {
        std::copy(lengths.begin(), lengths.end(), static_cast<int32_t*>(seqlens.data()));
        seqlens_mirror.upload();
    }
    void launch(cudaStream_t stream = nullptr) const {
        run(chosen, params.problem, params.tensors, workspace, stream);
    }
    void poison() {
        a.o.poison(), o.upload();
        lse.poison(), lse_mirror.upload();
        cuda(cudaDeviceSynchronize());
    }
    Result download() {
        cuda(cudaDeviceSynchronize());
        o.download(), lse_mirror.download();
        Result result;
        result.o.assign(a.o.storage(), a.o.storage() + a.o.storage_bytes());
        const float* values = static_cast<const float*>(lse.data());
        result.lse.assign(values, values + lse.numel());
        return result;
    }
    // With memory of its own.
    Result expected() { return run_kernel(kSplitKV, params, o, &lse_mirror); }

    Arrays a;
    HostTensor seqlens, lse;
    Mirror q, k, v, o, seqlens_mirror, lse_mirror;
    Params params;
    Plan chosen;
    void* workspace;
    size_t workspace_bytes;
};

bool has_split_kv(int64_t head_dim) {  // it may not be built
    Arrays a = dense(DType::kBFloat16, {1, 1, 1, 1, 1, head_dim, head_dim});
    const Params params =
        make_params(a.q.view(), a.k.view(), a.v.view(), a.o.view(), nullptr, kNoMask);
    Problem p = params.problem;
    p.device = DeviceType::kCuda;
    return kSplitKV.fits(p);
}

}  // namespace

TEST_CASE("parts and flags: every number of splits, every tile") {
    for (int num_splits = 1; num_splits <= 40; ++num_splits) {
        Options options = kBottomRight;
        options.num_splits = num_splits;
        const int64_t dims[] = {64, 96, 128, 192, 256};
        const std::pair<int64_t, int64_t> queries[] = {{1, 1}, {8, 1}, {6, 3}, {4, 21}};
        const int64_t dim = dims[num_splits % 5];
        const auto [heads, seqlen_q] = queries[num_splits % 4];
        Arrays a = dense(DType::kBFloat16, {2, heads, 1, seqlen_q, 5120, dim, dim - 8},
                         static_cast<uint64_t>(num_splits));
        a.seqlens_k = ints({2}, {5120, 128 * num_splits - 5});
        check(a, options, 3);
        options.window_left = 1500;  // which begins inside of a step
        check(std::move(a), options);
    }
}

TEST_CASE("parts and flags: whatever the workspace holds, the same bits 2000 times") {
    std::mt19937_64 random(1);
    for (const Sizes& sizes :
         {Sizes{1, 8, 8, 1, 8192, 128, 128}, Sizes{1, 32, 8, 1, 8192, 128, 128},
          Sizes{3, 4, 2, 1, 2048, 256, 256}, Sizes{1, 4, 4, 40, 4096, 64, 64}}) {
        for (int64_t num_splits : {0, 2, 33}) {
            if (!has_split_kv(sizes.head_dim)) continue;
            const size_t mark = arena.mark();
            Options options = kBottomRight;
            options.num_splits = num_splits;
            const auto whole = static_cast<int32_t>(sizes.seqlen_k);
            std::vector<int32_t> lengths(static_cast<size_t>(sizes.batch), whole);
            lengths.back() -= 100;
            Decoding work(sizes, lengths, options);
            const std::string what = describe(work.params.problem, options) + " by " +
                                     std::to_string(work.chosen.num_splits);
            watchdog.begin("workspace test of " + what);
            const Result expected = work.expected();
            std::vector<uint64_t> garbage((work.workspace_bytes + 7) / 8);
            for (int repeat = 0; repeat < 2000; ++repeat) {
                // Mostly what the call before left; else something that no call left.
                if (repeat % 100 == 0) {
                    for (uint64_t& x : garbage) x = repeat % 200 == 0 ? random() : 0;
                    cuda(cudaMemcpy(work.workspace, garbage.data(), work.workspace_bytes,
                                    cudaMemcpyHostToDevice));
                }
                if (repeat % 100 == 50) {
                    cuda(cudaMemset(work.workspace, 0xff, work.workspace_bytes));
                }
                work.poison();
                work.launch();
                if (repeat % 3 == 0) work.launch();  // right behind it, in the same memory
                if (!(work.download() == expected)) {
                    FAIL_CHECK(what << ": call " << repeat << " gave other bits");
                    break;
                }
            }
            CHECK(arena.is_intact());
            arena.release(mark);
        }
    }
}

TEST_CASE("parts and flags: a replayed graph, lengths that grow and shrink") {
    cudaStream_t stream = nullptr;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const Sizes& sizes :
         {Sizes{2, 8, 8, 1, 16384, 128, 128}, Sizes{2, 16, 2, 1, 16384, 64, 64},
          Sizes{2, 2, 2, 20, 16384, 128, 128}}) {
        if (!has_split_kv(sizes.head_dim)) continue;
        const size_t mark = arena.mark();
        Decoding work(sizes, {0, 0}, kBottomRight);
        const std::string what = describe(work.params.problem, kBottomRight);
        watchdog.begin("graph test of " + what);
        REQUIRE(work.chosen.num_splits > 1);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        cuda(cudaMemset(work.workspace, 0xff, work.workspace_bytes));
        cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        work.launch(stream);
        work.launch(stream);  // another nonce, the same memory
        cuda(cudaStreamEndCapture(stream, &graph));
        cuda(cudaGraphInstantiate(&executable, graph, 0));
        const int32_t lengths[] = {0,   1,    256,  257,  255, 512,  513,   511,   1024,  2048,
                                   100, 8192, 8193, 8191, 0,   4097, 16384, 16383, 16000, 3,
                                   257, 256,  9000, 2049, 0,   0,    300,   16384, 1,     12345};
        for (size_t i = 0; i + 1 < std::size(lengths); ++i) {
            work.set_lengths({lengths[i], lengths[i + 1]});
            const Result expected = work.expected();
            for (int repeat = 0; repeat < 3; ++repeat) {
                work.poison();
                cuda(cudaGraphLaunch(executable, stream));
                CHECK_MESSAGE(work.download() == expected, what, ": lengths ", lengths[i], " and ",
                              lengths[i + 1], ", replay ", repeat);
            }
        }
        cuda(cudaGraphExecDestroy(executable));
        cuda(cudaGraphDestroy(graph));
        CHECK(arena.is_intact());
        arena.release(mark);
    }
    cuda(cudaStreamDestroy(stream));
}

TEST_CASE("parts and flags: bits do not depend on the capacity or on company") {
    for (int64_t seqlen_q : {1, 20}) {
        if (!has_split_kv(64)) continue;
        std::optional<Result> expected;
        for (int64_t capacity : {4096, 4097, 9000}) {
            const size_t mark = arena.mark();
            Decoding work({2, 4, 2, seqlen_q, capacity, 64, 64}, {4000, 700}, kBottomRight);
            watchdog.begin("capacity test");
            // The same keys, whatever lies behind them.
            HostTensor* const caches[] = {&work.a.k, &work.a.v};
            for (HostTensor* cache : caches) {
                for (int64_t i = 0; i < 4; ++i) {
                    for (int64_t j = 0; j < capacity; ++j) {
                        for (int64_t d = 0; d < 64; ++d) {
                            const bool is_there = j < (i < 2 ? 4000 : 700);
                            const auto index = static_cast<uint64_t>((i * 4096 + j) * 64 + d);
                            cache->set({i / 2, i % 2, j, d},
                                       is_there ? testing::normal_value(5, index) : kNaN);
                        }
                    }
                }
            }
            work.k.upload(), work.v.upload();
            Result result = work.expected();
            if (!expected) expected = result;
            CHECK_MESSAGE(result == *expected, "capacity ", capacity);
            // The other sequence has none, few or all of its keys.
            for (int32_t other : {0, 1, 4000}) {
                work.set_lengths({other, 700});
                const Result company = work.expected();
                const size_t half = result.lse.size() / 2;
                CHECK(std::memcmp(company.lse.data() + half, expected->lse.data() + half,
                                  half * sizeof(float)) == 0);
            }
            arena.release(mark);
        }
    }
}

TEST_CASE("parts and flags: several streams, more blocks than the GPU holds") {
    const size_t mark = arena.mark();
    std::deque<Decoding> works;
    std::vector<cudaStream_t> streams;
    std::vector<Result> expected;
    for (const Sizes& sizes : {Sizes{2, 16, 8, 1, 8192, 64, 64}, Sizes{1, 8, 8, 40, 4096, 128, 128},
                               Sizes{1, 8, 8, 1, 8192, 128, 128}}) {
        if (!has_split_kv(sizes.head_dim)) continue;
        Options options = kBottomRight;
        options.num_splits = 40;
        const auto whole = static_cast<int32_t>(sizes.seqlen_k);
        std::vector<int32_t> lengths(static_cast<size_t>(sizes.batch), whole);
        Decoding& work = works.emplace_back(sizes, lengths, options);
        expected.push_back(work.expected());
        work.poison();
        cuda(cudaStreamCreateWithFlags(&streams.emplace_back(), cudaStreamNonBlocking));
    }
    for (int round = 0; round < 20; ++round) {
        watchdog.begin("streams with merges");
        for (int repeat = 0; repeat < 50; ++repeat) {
            for (size_t i = 0; i < works.size(); ++i) works[i].launch(streams[i]);
        }
        cuda(cudaDeviceSynchronize());
        for (size_t i = 0; i < works.size(); ++i) {
            CHECK_MESSAGE(works[i].download() == expected[i], "stream ", i, ", round ", round);
            works[i].poison();
        }
    }
    for (cudaStream_t stream : streams) cuda(cudaStreamDestroy(stream));
    CHECK(arena.is_intact());
    arena.release(mark);
}
