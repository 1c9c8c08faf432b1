#include "testing/reference.h"

#include "common/bias_mask.h"
#include "common/float8.h"
#include "common/key_rows.h"
#include "common/mask.h"
#include "testing/element.h"
#include "testing/parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace fa101::testing {
namespace {

// Row i of query head h in batch b.
template <DType kDType, DType kDTypeKV>
void reference_row(const Problem& p, const Tensors& t, int64_t b, int64_t h, int64_t i, double* o,
                   double* lse) {
    const int64_t h_kv = h / p.group_size();
    const int64_t q0 = b * t.q_batch_stride + h * t.q_head_stride + i * t.q_row_stride;
    const auto k_row = [&](int64_t j) {
        return h_kv * t.k_head_stride +
               key_offset(p, t, b, static_cast<int>(j), t.k_batch_stride, t.k_row_stride);
    };
    const auto v_row = [&](int64_t j) {
        return h_kv * t.v_head_stride +
               key_offset(p, t, b, static_cast<int>(j), t.v_batch_stride, t.v_row_stride);
    };
    const Mask mask = mask_of(p, t, b);
    const BiasMask bias_mask(p, t, b, h);
    const double k_descale = descale_of(t.k_descale, b, h_kv);
    const double v_descale = descale_of(t.v_descale, b, h_kv);

    std::vector<double> s;
    std::vector<int64_t> keys;  // that the query sees
    double row_max = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j < mask.seqlen_k; ++j) {
        if (j < i + mask.mask_left || j > i + mask.mask_right || bias_mask.hides(i, j)) continue;
        double dot = 0;
        const int64_t k0 = k_row(j);
        for (int64_t d = 0; d < p.head_dim; ++d) {
            dot += static_cast<double>(load_element(t.q_ptr, kDType, q0 + d)) *
                   load_element(t.k_ptr, kDTypeKV, k0 + d);
        }
        double logit = p.softmax_scale * k_descale * dot;
        if (p.softcap > 0) logit = p.softcap * std::tanh(logit / p.softcap);
        if (p.has_bias) {
            logit += static_cast<double>(load_element(bias_mask.bias_at(i, j), p.dtype_bias, 0));
        }
        s.push_back(logit);
        keys.push_back(j);
        row_max = std::max(row_max, logit);
    }
    if (std::isinf(row_max) && row_max < 0) row_max = 0;  // -inf - -inf is NaN

    std::fill(o, o + p.head_dim_v, 0.0);
    double row_sum = 0;
    for (size_t n = 0; n < s.size(); ++n) {
        const double weight = std::exp(s[n] - row_max);
        row_sum += weight;
        const int64_t v0 = v_row(keys[n]);
        for (int64_t d = 0; d < p.head_dim_v; ++d) {
            o[d] += weight * load_element(t.v_ptr, kDTypeKV, v0 + d);
        }
    }
    const double inverse = row_sum == 0 ? 0 : 1 / row_sum;  // no key, or all logits -inf: O = 0
    for (int64_t d = 0; d < p.head_dim_v; ++d) o[d] *= inverse * v_descale;
    if (lse != nullptr) *lse = row_max + std::log(row_sum);
}

}  // namespace

void reference_attention(const Problem& problem, const Tensors& tensors, double* o, double* lse,
                         int num_threads, int64_t row_step) {
    const int64_t rows = num_rows(problem, row_step);
    constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
    constexpr DType kF8 = DType::kFloat8E4M3;
    const bool is_fp8 = problem.dtype_kv == kF8;
    const auto row = problem.dtype_q == kF32 ? reference_row<kF32, kF32>
                     : problem.dtype_q == kF16
                         ? (is_fp8 ? reference_row<kF16, kF8> : reference_row<kF16, kF16>)
                         : (is_fp8 ? reference_row<kBF16, kF8> : reference_row<kBF16, kBF16>);
    parallel_for(problem.batch * problem.num_heads * rows, num_threads, [&](int64_t r) {
        const int64_t b = r / rows / problem.num_heads, h = r / rows % problem.num_heads;
        row(problem, tensors, b, h, r % rows * row_step, o + r * problem.head_dim_v,
            lse != nullptr ? lse + r : nullptr);
    });
}

}  // namespace fa101::testing
