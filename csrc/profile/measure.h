// One kernel on one problem: is it right, and how long does it take?
#pragma once

#include <fa101/params.h>

#include "profile/backend.h"
#include "profile/options.h"
#include "testing/compare.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fa101::profile {

// The inputs on the device, and what O must be.
struct Workload {
    Workload(Backend& backend, const Sizes& sizes, DType dtype, const Arguments& args);

    double flops() const;  // of the visible (query, key) pairs only
    double bytes() const;  // of q, k, v and o, each once: the least traffic

    Buffer q, k, v, o;
    Params params;
    int64_t row_step = 1;          // every row_step-th row of each head is checked
    std::vector<double> expected;  // (batch, num_heads, num_rows, head_dim), empty: no check
    double tolerance = 0;
};

enum class Status { kPassed, kFailed, kUnchecked, kNotRun, kError };

const char* name_of(Status status);

// One line of the table.
struct Row {
    std::string kernel;
    Status status = Status::kNotRun;
    std::string reason;                             // of kNotRun and kError
    std::optional<testing::Comparison> comparison;  // of kPassed and kFailed
    double tolerance = 0;
    std::vector<double> seconds;  // every timed run, in order
    double median = 0, lower_quartile = 0, upper_quartile = 0;
    double naive_median = 0;  // of the first rung on the same problem; 0 when unknown
    double tflops = 0;
    double gbytes_per_s = 0;  // of that least traffic
    double peak_share = 0;    // of Backend::peak; 0 when that is unknown
};

// Shows what is going on where someone is watching; only on a terminal.
using Progress = std::function<void(const std::string&)>;

Row profile_kernel(Backend& backend, const std::string& kernel, Workload& workload, bool check,
                   const Arguments& args, const Progress& progress);

// Sets median and quartiles from `seconds`.
void summarize(Row& row);

// 0 when every check passed, 1 when one failed or a kernel could not finish. What was not run does
// not count.
int exit_code(const std::vector<Row>& rows);

}  // namespace fa101::profile
