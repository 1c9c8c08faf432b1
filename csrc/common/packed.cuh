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

}  // namespace fa101
