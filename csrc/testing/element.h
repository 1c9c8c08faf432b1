// One element of any dtype as a number, bit by bit and on purpose without the intrinsics that the
// kernels use.
#pragma once

#include <fa101/tensor_view.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace fa101::testing {

// Unit roundoff: rounding x to the dtype moves it by at most this times |x|.
constexpr double roundoff_of(DType dtype) {
    return dtype == DType::kFloat32    ? 1.0 / (1 << 24)
           : dtype == DType::kFloat16  ? 1.0 / (1 << 11)
           : dtype == DType::kBFloat16 ? 1.0 / (1 << 8)
                                       : 1.0 / (1 << 4);
}

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float bf16_to_float(uint16_t bits) {
    return bits_to_float(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // ties to even
}

inline float fp16_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
    if (exponent == 0x1f) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float subnormal = static_cast<float>(mantissa) / (1 << 24);
    return sign != 0 ? -subnormal : subnormal;
}

inline uint16_t float_to_fp16(float value) {
    const uint16_t sign = static_cast<uint16_t>(float_to_bits(value) >> 16 & 0x8000);
    const float x = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (x >= 65520.0f) return sign | 0x7c00;  // half-way to the next power of two and up: inf
    if (x < 6.103515625e-05f) {               // subnormal: units of 2^-24
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(x * (1 << 24))));
    }
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = (bits + 0xfff + (bits >> 13 & 1)) >> 13;  // ties to even
    return static_cast<uint16_t>(sign | (rounded - (112u << 10)));     // bias 127 becomes 15
}

// fp8 E4M3 by its definition; see common/float8.h.
inline float e4m3_to_float(uint8_t code) {
    const int exponent = code >> 3 & 0xf, mantissa = code & 7;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    if ((code & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
    return std::copysign(value, (code & 0x80) != 0 ? -1.0f : 1.0f);
}

inline uint8_t float_to_e4m3(float value) {
    const int sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7f);
    const float x = std::fmin(std::fabs(value), 448.0f);
    const int exponent = x < 0.015625f ? -6 : std::ilogb(x);          // below 2^-6: subnormal
    const float steps = std::nearbyint(std::ldexp(x, 3 - exponent));  // eighths; ties to even
    return static_cast<uint8_t>(sign + (exponent + 6) * 8 + static_cast<int>(steps));
}

inline float load_element(const void* data, DType dtype, int64_t index) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
    if (dtype == DType::kFloat8E4M3) {
        return e4m3_to_float(static_cast<const uint8_t*>(data)[index]);
    }
    const uint16_t bits = static_cast<const uint16_t*>(data)[index];
    return dtype == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

inline void store_element(void* data, DType dtype, int64_t index, float value) {
    if (dtype == DType::kFloat32) {
        static_cast<float*>(data)[index] = value;
    } else if (dtype == DType::kFloat8E4M3) {
        static_cast<uint8_t*>(data)[index] = float_to_e4m3(value);
    } else {
        static_cast<uint16_t*>(data)[index] =
            dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
    }
}

}  // namespace fa101::testing
