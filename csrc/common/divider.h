// Division by a number that the host knows and the compiler does not. A GPU has no instruction for
// it; what the compiler makes of one are 30 instructions and over 100 cycles, too much where
// several depend on each other before the first load. The host finds a multiplier instead:
//
//     n / d = n * m >> s        s = 31 + ceil(log2 d)     m = ceil(2^s / d) < 2^32
//
// exact for 0 <= n < 2^31, since n * (m * d - 2^s) < 2^31 * d <= 2^s (Granlund & Montgomery 1994).
#pragma once

#include "common/host_device.h"

#include <cstdint>

namespace fa101 {

struct Divider {
    uint32_t divisor = 1, multiplier = uint32_t{1} << 31;
    int shift = 31;

    // 1 <= d < 2^31
    static Divider by(int64_t d) {
        Divider divider;
        divider.divisor = static_cast<uint32_t>(d);
        while ((int64_t{1} << (divider.shift - 31)) < d) ++divider.shift;
        const uint64_t power = uint64_t{1} << divider.shift;
        divider.multiplier = static_cast<uint32_t>((power - 1) / divider.divisor + 1);
        return divider;
    }

    FA101_HOST_DEVICE int quotient(int n) const {
        return static_cast<int>((uint64_t{static_cast<uint32_t>(n)} * multiplier) >> shift);
    }
    FA101_HOST_DEVICE int remainder(int n) const {
        return n - quotient(n) * static_cast<int>(divisor);
    }
};

}  // namespace fa101
