// fp8 E4M3 (OCP 8-bit floating point specification, 2023): a sign, 4 bits of exponent with bias 7,
// 3 of mantissa. It has no inf, and one NaN of either sign, all other bits set:
//
//     s 0000 mmm   m * 2^-9                 s 1111 110   448, the largest
//     s eeee mmm   (1 + m / 8) * 2^(e - 7)  s 1111 111   NaN
//
// Here is the way into it, for append(), and what its codes are scaled by; each kernel widens them
// where it loads them.
#pragma once

#include <fa101/params.h>

#include "common/host_device.h"

#include <cstdint>
#include <cstring>

namespace fa101 {

// The nearest code, ties to even; the largest for what is beyond it, inf too; NaN for NaN.
FA101_HOST_DEVICE uint8_t float_to_e4m3(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    uint32_t code;
    if (magnitude > 0x7f800000u) {
        code = 0x7f;
    } else if (magnitude >= 0x43e00000u) {  // 448
        code = 0x7e;
    } else if (magnitude >= 0x3c800000u) {  // 2^-6: the exponent's bias 127 becomes 7
        code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    } else {  // 2^14 has the unit 2^-9, so the addition rounds to a multiple of it
        float sum;
        std::memcpy(&sum, &magnitude, sizeof sum);
        sum += 16384.0f;
        std::memcpy(&code, &sum, sizeof code);
        code -= 0x46800000u;
    }
    return static_cast<uint8_t>(sign | code);
}

// What the codes of a head of K or V are to be multiplied by.
FA101_HOST_DEVICE float descale_of(const Descale& descale, int64_t batch, int64_t head) {
    if (descale.ptr == nullptr) return 1.0f;
    return descale.ptr[batch * descale.batch_stride + head * descale.head_stride];
}

}  // namespace fa101
