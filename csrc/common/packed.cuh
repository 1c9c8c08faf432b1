// Floats of 16 bits, two in a 32-bit word as the tensor cores take them (and of 8 bits, four):
// rounding to them, and looking for those that are not finite.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace cutlass {
struct half_t;
}

namespace fa101 {

// float16 under both its names; what has 16 bits and is not is bfloat16.
template <class T>
constexpr bool kIsHalf = std::is_same_v<T, __half> || std::is_same_v<T, cutlass::half_t>;

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t word;
    if constexpr (kIsHalf<T>) {
        const __half2 pair = __floats2half2_rn(low, high);
        memcpy(&word, &pair, sizeof(word));
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&word, &pair, sizeof(word));
    }
    return word;
}

// Not 0 where one of the two 16-bit floats in a word is NaN or inf, all exponent bits set: adding
// the lowest of them carries into the sign bit. Of the four of fp8, NaN alone has all bits set.
template <class T>
__device__ __forceinline__ uint32_t nonfinite(uint32_t word) {
    if constexpr (std::is_same_v<T, uint8_t>) {
        return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    } else {
        constexpr uint32_t kExponent = kIsHalf<T> ? 0x7c007c00u : 0x7f807f80u;
        constexpr uint32_t kLowest = kIsHalf<T> ? 0x04000400u : 0x00800080u;
        return ((word & kExponent) + kLowest) & 0x80008000u;
    }
}
template <class T>
__device__ __forceinline__ bool is_nonfinite(T x) {
    using Bits = std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>;
    return nonfinite<T>(reinterpret_cast<const Bits&>(x)) != 0;
}

// Whether all of the 16-bit floats in the words are finite: 0 times one is 0, or NaN.
template <class T, int kRows, int kCols>
__device__ __forceinline__ bool are_finite(const uint32_t (&words)[kRows][kCols]) {
    using Pair = std::conditional_t<kIsHalf<T>, __half2, __nv_bfloat162>;
    const uint32_t zero = 0;
    Pair sums[2];
    memcpy(&sums[0], &zero, sizeof(zero));
    sums[1] = sums[0];
    const Pair zeros = sums[0];
#pragma unroll
    for (int i = 0; i < kRows * kCols; ++i) {
        Pair pair;
        memcpy(&pair, &words[i / kCols][i % kCols], sizeof(pair));
        sums[i % 2] = __hfma2(pair, zeros, sums[i % 2]);
    }
    uint32_t bits[2];
    memcpy(bits, sums, sizeof(bits));
    return ((bits[0] | bits[1]) & 0x7fff7fffu) == 0;
}

}  // namespace fa101
