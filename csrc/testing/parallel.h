// Calls body(i) for every i in [0, n), spread over threads. The oracle does not share the thread
// pool it is there to check.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace fa101::testing {

template <class Body>
void parallel_for(int64_t n, int num_threads, const Body& body) {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t i = next++; i < n; i = next++) body(i);
    };
    std::vector<std::thread> threads;
    for (int64_t t = 1; t < std::min<int64_t>(num_threads, n); ++t) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
}

}  // namespace fa101::testing
