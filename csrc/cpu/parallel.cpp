#include "cpu/parallel.h"

#include <fa101/device_info.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fa101 {

void parallel_for(int64_t num_tasks, int num_threads,
                  const std::function<void(int64_t task, int worker)>& body) {
    std::atomic<int64_t> next_task{0};
    std::exception_ptr error;
    std::once_flag first_error;

    const auto work = [&](int worker) {
        try {
            for (int64_t task; (task = next_task.fetch_add(1)) < num_tasks;) body(task, worker);
        } catch (...) {
            next_task = num_tasks;  // the others stop early
            std::call_once(first_error, [&] { error = std::current_exception(); });
        }
    };

    std::vector<std::thread> threads;
    const auto start_worker = [&](int worker) {
        try {
            threads.emplace_back(work, worker);
            return true;
        } catch (const std::system_error&) {
            return false;  // the system gives no more: those that run, and this one, do it all
        }
    };
    const int64_t wanted = std::min<int64_t>(num_threads, num_tasks);
    for (int worker = 1; worker < wanted && start_worker(worker); ++worker) {
    }
    work(0);
    for (std::thread& thread : threads) thread.join();
    if (error) std::rethrow_exception(error);
}

int useful_threads(const Problem& problem, int64_t num_tasks, int max_threads) {
    constexpr double kFlopsPerThread = 2e6;  // some 20 us
    const double flops = 2.0 * static_cast<double>(problem.visible_pairs()) *
                         static_cast<double>(problem.head_dim + problem.head_dim_v);
    const double limit =
        std::min({flops / kFlopsPerThread, static_cast<double>(num_tasks),
                  static_cast<double>(max_threads), static_cast<double>(cpu_threads())});
    return std::max(1, static_cast<int>(limit));
}

}  // namespace fa101
