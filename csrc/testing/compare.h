// Is a kernel's result the oracle's? Non-finite values must sit at the same places; elsewhere the
// absolute difference counts.
#pragma once

#include <fa101/params.h>
#include <fa101/plan.h>

#include "testing/element.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

namespace fa101::testing {

using Shape4 = std::array<int64_t, 4>;

struct Comparison {
    // Largest |actual - expected|; +inf when a NaN or an infinity has no equal on the other side.
    double max_error = 0;
    double max_expected = 0;  // largest finite |expected|: the scale of the result
    Shape4 worst = {};        // where max_error is; the first such place
    double actual = 0, expected = 0;

    // NaN never passes: max_error is never NaN, and no tolerance reaches +inf.
    bool passed(double tolerance) const {
        return std::isfinite(max_error) && max_error <= tolerance;
    }

    std::string describe() const {
        std::ostringstream text;
        text.precision(9);
        text << "max error " << max_error << " at (" << worst[0] << ", " << worst[1] << ", "
             << worst[2] << ", " << worst[3] << "): got " << actual << ", expected " << expected;
        return text.str();
    }
};

// |actual - expected|, or +inf when one is NaN or infinite and the other is not the same.
inline double error_of(double actual, double expected) {
    if (std::isnan(actual) && std::isnan(expected)) return 0;
    if (std::isfinite(actual) && std::isfinite(expected)) return std::fabs(actual - expected);
    return actual == expected ? 0 : std::numeric_limits<double>::infinity();
}

// `actual` is strided (in elements) and of any dtype, `expected` contiguous; both have `shape`.
// Three axes (lse) compare as (batch, heads, rows, 1).
inline Comparison compare(const void* actual, DType dtype, const Shape4& shape,
                          const Shape4& strides, const double* expected) {
    Comparison result;
    double worst_error = -1;
    for (int64_t a = 0; a < shape[0]; ++a) {
        for (int64_t b = 0; b < shape[1]; ++b) {
            for (int64_t c = 0; c < shape[2]; ++c) {
                for (int64_t d = 0; d < shape[3]; ++d) {
                    const int64_t index =
                        a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
                    const double got = load_element(actual, dtype, index), want = *expected++;
                    if (std::isfinite(want)) {
                        result.max_expected = std::max(result.max_expected, std::fabs(want));
                    }
                    if (const double error = error_of(got, want); error > worst_error) {
                        worst_error = error;
                        result.max_error = error;
                        result.worst = {a, b, c, d};
                        result.actual = got;
                        result.expected = want;
                    }
                }
            }
        }
    }
    return result;
}

// Adds the number of bytes in which two arrays of the current GPU differ to *count, there as well;
// only in a build with CUDA.
void count_differences_gpu(const void* a, const void* b, int64_t bytes, unsigned* count,
                           Stream stream);

// How far O may be from the oracle, for inputs around 1:
//     max |O| * (4 u + 4 u32 sqrt(head_dim + seqlen_k)),   u and u32 the roundoffs of dtype and
//     fp32
// The first term is the rounding of P and O to the dtype; the second is the random walk of float32
// sums over head_dim products and seqlen_k keys, which dominates when the dtype is float32.
inline double output_tolerance(const Problem& problem, double max_expected) {
    const double terms = static_cast<double>(problem.head_dim + problem.seqlen_k);
    return max_expected *
           (4 * roundoff_of(problem.dtype_o) + 4 * roundoff_of(DType::kFloat32) * std::sqrt(terms));
}

// The same for lse, which is float32 whatever the dtype; logits around 1 give it an absolute part.
inline double lse_tolerance(const Problem& problem, double max_expected) {
    const double terms = static_cast<double>(problem.head_dim + problem.seqlen_k);
    return std::max(1.0, max_expected) * 4 * roundoff_of(DType::kFloat32) * (1 + std::sqrt(terms));
}

}  // namespace fa101::testing
