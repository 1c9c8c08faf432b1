// Arrays for tests and for the profiler: any shape, strides and dtype; poisoned, guarded, filled.
#pragma once

#include <fa101/tensor_view.h>

#include "testing/element.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

namespace fa101::testing {

// Standard normal, a pure function of (seed, index): the same whatever the dtype, the strides or
// the number of threads. Two uniforms from SplitMix64, then Box-Muller.
inline float normal_value(uint64_t seed, uint64_t index) {
    uint64_t x = (seed + 1) * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    x = x ^ x >> 31;
    const float u = (static_cast<float>(x >> 40) + 1.0f) / (1 << 24);  // (0, 1]
    const float angle = static_cast<float>(x & 0xffffff) / (1 << 24) * 6.28318531f;
    return std::sqrt(-2.0f * std::log(u)) * std::cos(angle);
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        strides[i] = stride;
        stride *= std::max<int64_t>(shape[i], 1);  // as torch has it for empty axes
    }
    return strides;
}

// Owns memory for a strided array (strides may be 0 or negative) with guards on both sides. All of
// it starts as 0xff bytes, a NaN in every dtype: what is read but never written shows up.
class HostTensor {
  public:
    // `offset` shifts the first element by that many elements from a 16-byte boundary.
    HostTensor(DType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
               int64_t offset = 0)
        : dtype_(dtype), shape_(std::move(shape)), strides_(std::move(strides)) {
        if (shape_.size() != strides_.size() || shape_.size() > kMaxDims) {
            throw std::invalid_argument("HostTensor: shape and strides differ in length");
        }
        int64_t low = 0, high = 0;
        for (size_t i = 0; i < shape_.size(); ++i) {
            const int64_t reach = shape_[i] > 0 ? (shape_[i] - 1) * strides_[i] : 0;
            (reach < 0 ? low : high) += reach;
        }
        base_ = kGuard + (-low + 15) / 16 * 16 + offset;
        const int64_t elements = base_ + high + 1 + kGuard;
        storage_.assign(static_cast<size_t>(elements * size_of(dtype_)), kPoison);
    }
    HostTensor(DType dtype, const std::vector<int64_t>& shape)
        : HostTensor(dtype, shape, contiguous_strides(shape)) {}

    DType dtype() const { return dtype_; }
    const std::vector<int64_t>& shape() const { return shape_; }
    const std::vector<int64_t>& strides() const { return strides_; }
    int64_t numel() const {
        int64_t n = 1;
        for (int64_t size : shape_) n *= size;
        return n;
    }

    void* data() { return storage_.data() + base_ * size_of(dtype_); }
    const void* data() const { return storage_.data() + base_ * size_of(dtype_); }

    // All of the memory, guards included, to mirror it on a device.
    std::byte* storage() { return storage_.data(); }
    size_t storage_bytes() const { return storage_.size(); }

    TensorView view() {
        TensorView v;
        v.data = data();
        v.dtype = dtype_;
        v.ndim = static_cast<int>(shape_.size());
        for (int i = 0; i < v.ndim; ++i) v.shape[i] = shape_[i], v.strides[i] = strides_[i];
        return v;
    }

    float at(const std::vector<int64_t>& index) const {
        return load_element(data(), dtype_, offset_of(index));
    }
    void set(const std::vector<int64_t>& index, float value) {
        store_element(data(), dtype_, offset_of(index), value);
    }

    // set(index, value(i)) for every index, i counting in row-major order.
    template <class Value>
    void fill(const Value& value) {
        for_each_offset([&](int64_t i, int64_t offset) {
            store_element(data(), dtype_, offset, static_cast<float>(value(i)));
        });
    }
    void fill_normal(uint64_t seed, float stddev = 1.0f, float mean = 0.0f) {
        fill([=](int64_t i) {
            return mean + stddev * normal_value(seed, static_cast<uint64_t>(i));
        });
    }
    void poison() { std::memset(storage_.data(), static_cast<int>(kPoison), storage_.size()); }

    // False when something wrote between the elements or into the guards.
    bool padding_is_intact() const {
        HostTensor rest = *this;
        rest.for_each_offset([&](int64_t, int64_t offset) {
            std::memset(static_cast<std::byte*>(rest.data()) + offset * size_of(dtype_),
                        static_cast<int>(kPoison), static_cast<size_t>(size_of(dtype_)));
        });
        for (std::byte b : rest.storage_) {
            if (b != kPoison) return false;
        }
        return true;
    }

  private:
    static constexpr std::byte kPoison{0xff};
    static constexpr int64_t kGuard = 64;  // elements on each side; keeps the 16-byte alignment

    int64_t offset_of(const std::vector<int64_t>& index) const {
        int64_t offset = 0;
        for (size_t i = 0; i < shape_.size(); ++i) offset += index.at(i) * strides_[i];
        return offset;
    }

    template <class Body>
    void for_each_offset(const Body& body) const {
        const int64_t n = numel();
        for (int64_t i = 0; i < n; ++i) {
            int64_t rest = i, offset = 0;
            for (size_t axis = shape_.size(); axis-- > 0; rest /= shape_[axis]) {
                offset += rest % shape_[axis] * strides_[axis];
            }
            body(i, offset);
        }
    }

    DType dtype_;
    std::vector<int64_t> shape_, strides_;
    int64_t base_ = 0;  // element index of the first element in storage_
    std::vector<std::byte> storage_;
};

}  // namespace fa101::testing
