// Flags in a workspace, which nobody clears before a launch: one is up when it equals the launch's
// nonce, 64 bits that no launch before had. What else memory may hold equals it by a chance of
// 2^-64. Who is the last to need it takes it down: a CUDA graph brings the same nonce again.
// flag.cuh has the device's side.
#pragma once

#include <cstdint>

namespace fa101 {

// Another one with every call, from whatever threads, and never 0.
uint64_t next_nonce();

}  // namespace fa101
