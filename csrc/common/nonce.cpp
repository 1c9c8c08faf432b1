#include "common/nonce.h"

#include <atomic>
#include <random>

namespace fa101 {

uint64_t next_nonce() {
    static std::atomic<uint64_t> counter = [] {
        std::random_device random;
        return (uint64_t{random()} << 32) | random();
    }();
    uint64_t x = 0;
    while (x == 0) {
        // SplitMix64 (Steele, Lea, Flood 2014): a permutation, so no number comes twice.
        x = counter += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
    }
    return x;
}

}  // namespace fa101
