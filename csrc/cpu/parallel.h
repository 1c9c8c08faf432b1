// Threads for one call.
#pragma once

#include <fa101/params.h>

#include <cstdint>
#include <functional>

namespace fa101 {

// Calls body(task, worker) once for every task in [0, num_tasks), tasks in order of their number,
// from at most num_threads threads; worker < num_threads tells the threads apart. The threads are
// started here and joined here: no pool outlives the call, so a fork() afterwards is safe, and the
// caller's own OpenMP settings are left alone. Starting one costs some 20 us, so callers ask for
// few where there is little to do. The first exception a task throws is thrown again here.
void parallel_for(int64_t num_tasks, int num_threads,
                  const std::function<void(int64_t task, int worker)>& body);

// How many threads the problem's arithmetic in num_tasks tasks is worth: at most max_threads and
// cpu_threads().
int useful_threads(const Problem& problem, int64_t num_tasks, int max_threads);

}  // namespace fa101
