// The device's side of nonce.h.
#pragma once

#include <cstdint>

namespace fa101 {

// What the block wrote before its last barrier is seen by who sees the flag, and acquires.
__device__ __forceinline__ void publish(uint64_t* flag, uint64_t nonce) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(nonce) : "memory");
}
__device__ __forceinline__ void await_flag(const uint64_t* flag, uint64_t nonce) {
    uint64_t value = 0;
    while (true) {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
        if (value == nonce) break;
        __nanosleep(32);
    }
}
// Once for many flags: an acquire with every look would empty the L1 of the blocks that read keys.
__device__ __forceinline__ void acquire() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace fa101
