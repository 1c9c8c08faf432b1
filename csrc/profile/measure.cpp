#include "profile/measure.h"

#include <fa101/error.h>

#include "testing/host_tensor.h"
#include "testing/parallel.h"
#include "testing/reference.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <new>

namespace fa101::profile {
namespace {

// Where --warmup and --iters leave it to us. Warming up takes three runs and long enough for clocks
// to rise, timing a second; slow kernels get fewer runs, and one that takes seconds gets one.
constexpr int64_t kAutoWarmup = 3, kAutoIters = 100, kMinIters = 3;
constexpr double kMinWarmupSeconds = 0.05, kMaxWarmupSeconds = 0.3;
constexpr double kSeconds = 1.0, kMaxSeconds = 4.0;

class Stopwatch {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Normal values, some at a time so that the host needs no second copy of everything.
void fill_normal(Backend& backend, void* data, DType dtype, int64_t n, uint64_t seed) {
    constexpr int64_t kChunk = 1 << 22, kPiece = 1 << 12;
    std::vector<std::byte> staging(static_cast<size_t>(std::min(n, kChunk) * size_of(dtype)));
    for (int64_t begin = 0; begin < n; begin += kChunk) {
        const int64_t count = std::min(kChunk, n - begin);
        testing::parallel_for((count + kPiece - 1) / kPiece, cpu_threads(), [&](int64_t piece) {
            for (int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); ++i) {
                const auto index = static_cast<uint64_t>(begin + i);
                testing::store_element(staging.data(), dtype, i,
                                       testing::normal_value(seed, index));
            }
        });
        backend.upload(static_cast<std::byte*>(data) + begin * size_of(dtype), staging.data(),
                       count * size_of(dtype));
    }
}

TensorView view_of(const Buffer& buffer, DType dtype, Device device, int64_t batch, int64_t heads,
                   int64_t rows, int64_t dim) {
    return {buffer.get(),
            dtype,
            device,
            4,
            {batch, heads, rows, dim},
            {heads * rows * dim, rows * dim, dim, 1},
            false};
}

testing::Comparison compare_output(Backend& backend, const Workload& w) {
    const Problem& p = w.params.problem;
    const Tensors& t = w.params.tensors;
    const int64_t bytes = p.batch * t.o_batch_stride * size_of(p.dtype_o);
    std::vector<std::byte> o(static_cast<size_t>(bytes));
    backend.download(o.data(), w.o.get(), bytes);
    testing::Comparison result = testing::compare(
        o.data(), p.dtype_o, {p.batch, p.num_heads, testing::num_rows(p, w.row_step), p.head_dim_v},
        {t.o_batch_stride, t.o_head_stride, w.row_step * t.o_row_stride, 1}, w.expected.data());
    result.worst[2] *= w.row_step;
    return result;
}

}  // namespace

Workload::Workload(Backend& backend, const Sizes& s, DType dtype, const Arguments& args) {
    const auto bytes = [&](int64_t heads, int64_t rows) {
        return static_cast<double>(s.batch) * static_cast<double>(heads) *
               static_cast<double>(rows) * static_cast<double>(s.head_dim * size_of(dtype));
    };
    const double q_bytes = bytes(s.num_heads, s.seqlen_q),
                 k_bytes = bytes(s.num_heads_kv, s.seqlen_k);
    backend.require_free(2 * q_bytes + 2 * k_bytes, "q, k, v and o");
    // From here on everything fits into memory, so also into 64 bits.
    q = backend.allocate(static_cast<int64_t>(q_bytes), "q");
    k = backend.allocate(static_cast<int64_t>(k_bytes), "k");
    v = backend.allocate(static_cast<int64_t>(k_bytes), "v");
    o = backend.allocate(static_cast<int64_t>(q_bytes), "o");
    const auto view = [&](const Buffer& buffer, int64_t heads, int64_t rows) {
        return view_of(buffer, dtype, backend.id, s.batch, heads, rows, s.head_dim);
    };
    Options options;
    options.causal = args.causal;
    params = make_params(view(q, s.num_heads, s.seqlen_q), view(k, s.num_heads_kv, s.seqlen_k),
                         view(v, s.num_heads_kv, s.seqlen_k), view(o, s.num_heads, s.seqlen_q),
                         nullptr, options);

    const auto seed = static_cast<uint64_t>(args.seed);
    const int64_t q_size = s.batch * s.num_heads * s.seqlen_q * s.head_dim;
    const int64_t k_size = s.batch * s.num_heads_kv * s.seqlen_k * s.head_dim;
    fill_normal(backend, q.get(), dtype, q_size, 3 * seed);
    fill_normal(backend, k.get(), dtype, k_size, 3 * seed + 1);
    fill_normal(backend, v.get(), dtype, k_size, 3 * seed + 2);
    if (!args.check) return;

    // Odd, so that the rows checked fall on every row of a tile; and no head goes unchecked.
    const double excess = std::ceil(flops() / backend.reference_budget());
    const double most = static_cast<double>(std::max<int64_t>(1, s.seqlen_q / 8));
    row_step = static_cast<int64_t>(std::min(excess, most)) | 1;
    expected = backend.reference(params.problem, params.tensors, row_step);
    double max_expected = 0;
    for (double x : expected) max_expected = std::max(max_expected, std::fabs(x));
    tolerance = testing::output_tolerance(params.problem, max_expected);
}

double Workload::flops() const {
    const Problem& p = params.problem;
    return 2.0 * static_cast<double>(p.visible_pairs()) *
           static_cast<double>(p.head_dim + p.head_dim_v);
}

double Workload::bytes() const {
    const Problem& p = params.problem;
    const double queries = static_cast<double>(p.num_heads) * static_cast<double>(p.seqlen_q);
    const double keys = static_cast<double>(p.num_heads_kv) * static_cast<double>(p.seqlen_k);
    return static_cast<double>(p.batch) * (queries + keys) *
           static_cast<double>((p.head_dim + p.head_dim_v) * size_of(p.dtype_q));
}

const char* name_of(Status status) {
    switch (status) {
        case Status::kPassed:
            return "passed";
        case Status::kFailed:
            return "FAILED";
        case Status::kUnchecked:
            return "unchecked";
        case Status::kNotRun:
            return "not run";
        case Status::kError:
            return "ERROR";
    }
    return "";
}

Row profile_kernel(Backend& backend, const std::string& kernel, Workload& workload, bool check,
                   const Arguments& args, const Progress& progress) {
    const Problem& problem = workload.params.problem;
    Row row;
    row.kernel = kernel;
    row.reason = supports(kernel, problem, backend.info);
    if (!row.reason.empty()) return row;
    try {
        const Plan plan = fa101::plan(problem, backend.info, kernel);
        const Buffer workspace = backend.allocate(plan.workspace_bytes, "the workspace");
        const auto launch = [&](Stream stream) {
            run(plan, problem, workload.params.tensors, workspace.get(), stream);
        };

        const Stopwatch warming;
        row.status = Status::kUnchecked;
        if (check) {
            progress(kernel + ": checking");
            backend.fill(
                workload.o.get(), 0xff,  // NaN, so that what is not written shows
                problem.batch * workload.params.tensors.o_batch_stride * size_of(problem.dtype_o));
            backend.time(launch);
            row.tolerance = workload.tolerance;
            row.comparison = compare_output(backend, workload);
            row.status = row.comparison->passed(row.tolerance) ? Status::kPassed : Status::kFailed;
        }

        const auto is_cold = [&](int64_t i) {
            if (args.warmup) return i < *args.warmup;
            const double seconds = warming.seconds();
            return seconds < kMaxWarmupSeconds && (i < kAutoWarmup || seconds < kMinWarmupSeconds);
        };
        for (int64_t i = 0; is_cold(i); ++i) {
            progress(kernel + ": warming up");
            backend.time(launch);
        }

        const Stopwatch timing;
        const int64_t iters = args.iters.value_or(kAutoIters);
        for (int64_t i = 0; i < iters; ++i) {
            const double limit = i < kMinIters ? kMaxSeconds : kSeconds;
            if (!args.iters && i > 0 && timing.seconds() > limit) break;
            progress(kernel + ": run " + std::to_string(i + 1) + " of " +
                     (args.iters ? "" : "up to ") + std::to_string(iters));
            row.seconds.push_back(backend.time(launch));
        }
        summarize(row);
        row.tflops = workload.flops() / row.median / 1e12;
        row.gbytes_per_s = workload.bytes() / row.median / 1e9;
        const double peak = backend.peak(problem.dtype_q).flops;
        row.peak_share = peak > 0 ? 1e12 * row.tflops / peak : 0;
    } catch (const OutOfMemory& error) {
        row.status = Status::kNotRun;
        row.reason = error.what();
    } catch (const std::bad_alloc&) {
        row.status = Status::kNotRun;
        row.reason = "out of memory on the host";
    } catch (const Error& error) {
        row.status = Status::kError;
        row.reason = error.what();
    }
    return row;
}

void summarize(Row& row) {
    if (row.seconds.empty()) return;
    std::vector<double> sorted = row.seconds;
    std::sort(sorted.begin(), sorted.end());
    const auto quantile = [&](double q) {
        const double position = q * static_cast<double>(sorted.size() - 1);
        const auto below = static_cast<size_t>(position);
        const size_t above = std::min(below + 1, sorted.size() - 1);
        return sorted[below] +
               (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
    };
    row.lower_quartile = quantile(0.25);
    row.median = quantile(0.5);
    row.upper_quartile = quantile(0.75);
}

int exit_code(const std::vector<Row>& rows) {
    const bool bad = std::any_of(rows.begin(), rows.end(), [](const Row& row) {
        return row.status == Status::kFailed || row.status == Status::kError;
    });
    return bad ? 1 : 0;
}

}  // namespace fa101::profile
