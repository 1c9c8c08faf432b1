// Addresses are sums of index * stride, so "do they meet?" asks whether
//
//     sum over terms of x * step  ==  target,    0 <= x <= count
//
// has a solution in integers. With many axes of wild strides that is hard in general; for arrays
// that nest, as all real ones do, trying the largest step first leaves one or two candidates a
// level. The idea is that of NumPy's shares_memory.
#include "overlap.h"

#include <cstdint>
#include <cstdlib>
#include <utility>

namespace fa101 {
namespace {

// Nodes visited before giving up; real arrays need a handful.
constexpr int kBudget = 4096;

class Sum {
  public:
    // Adds x * step for x in [0, count]; a negative step counts from its far end.
    void add(int64_t step, int64_t count) {
        if (step < 0) target_ += count * -step, step = -step;
        if (step == 0 || count == 0) return;
        int at = 0;
        while (at < size_ && terms_[at].step > step) ++at;
        if (at < size_ && terms_[at].step == step) {
            terms_[at].count += count;
            return;
        }
        for (int i = size_++; i > at; --i) terms_[i] = terms_[i - 1];
        terms_[at] = {step, count};
    }

    // Whether the sum can be `target`; when the budget runs out the answer is yes, the safe one.
    bool can_be(int64_t target) {
        reach_[size_] = 0;
        for (int i = size_ - 1; i >= 0; --i) {
            reach_[i] = reach_[i + 1] + terms_[i].step * terms_[i].count;
        }
        budget_ = kBudget;
        return search(0, target + target_);
    }

  private:
    struct Term {
        int64_t step, count;
    };

    bool search(int i, int64_t rest) {
        if (rest < 0 || rest > reach_[i]) return false;
        if (i == size_ || --budget_ < 0) return true;
        const auto [step, count] = terms_[i];
        const int64_t most = rest / step < count ? rest / step : count;
        for (int64_t x = most; x >= 0 && rest - x * step <= reach_[i + 1]; --x) {
            if (search(i + 1, rest - x * step)) return true;
        }
        return false;
    }

    static constexpr int kMaxTerms = 2 * kMaxDims + 1;
    Term terms_[kMaxTerms];
    int64_t reach_[kMaxTerms + 1];
    int size_ = 0;
    int budget_ = 0;
    int64_t target_ = 0;  // what negative steps moved the target by
};

bool is_empty(const TensorView& t) {
    for (int i = 0; i < t.ndim; ++i) {
        if (t.shape[i] == 0) return true;
    }
    return false;
}

// From the first byte to behind the last.
std::pair<intptr_t, intptr_t> extent(const TensorView& t) {
    int64_t first = 0, last = 0;  // elements
    for (int i = 0; i < t.ndim; ++i) {
        const int64_t reach = t.strides[i] * (t.shape[i] - 1);
        (reach < 0 ? first : last) += reach;
    }
    const intptr_t base = reinterpret_cast<intptr_t>(t.data);
    return {base + first * size_of(t.dtype), base + (last + 1) * size_of(t.dtype)};
}

}  // namespace

bool share_memory(const TensorView& a, const TensorView& b) {
    if (is_empty(a) || is_empty(b)) return false;
    // Nearly always they lie apart, and the question is not asked.
    const auto [a_begin, a_end] = extent(a);
    const auto [b_begin, b_end] = extent(b);
    if (a_end <= b_begin || b_end <= a_begin) return false;
    // address of a - address of b, axis by axis and byte by byte, is 0 somewhere
    Sum difference;
    for (const auto& [t, sign] : {std::pair<const TensorView&, int64_t>{a, 1}, {b, -1}}) {
        const int64_t size = size_of(t.dtype);
        for (int i = 0; i < t.ndim; ++i) {
            difference.add(sign * t.strides[i] * size, t.shape[i] - 1);
        }
        difference.add(sign, size - 1);
    }
    return difference.can_be(reinterpret_cast<intptr_t>(b.data) -
                             reinterpret_cast<intptr_t>(a.data));
}

bool shares_memory_with_itself(const TensorView& t) {
    if (is_empty(t)) return false;
    // Two different indices at one address: let `first` be the first axis where they differ.
    for (int first = 0; first < t.ndim; ++first) {
        if (t.shape[first] == 1) continue;
        const int64_t stride = std::abs(t.strides[first]);
        if (stride == 0) return true;
        Sum difference;  // of the indices, the one of `first` at least 1
        difference.add(stride, t.shape[first] - 2);
        for (int i = first + 1; i < t.ndim; ++i) {
            difference.add(t.strides[i], t.shape[i] - 1);
            difference.add(-t.strides[i], t.shape[i] - 1);
        }
        if (difference.can_be(-stride)) return true;
    }
    return false;
}

}  // namespace fa101
