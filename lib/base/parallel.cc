// SPDX-License-Identifier: Apache-2.0
#include "lib/base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "lib/base/catch_exceptions.h"

namespace reshard {

int thread_count(int requested) {
  if (requested > 0) return requested;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

Status parallel_for(Index n, int threads, const std::function<Status(int thread, Index i)>& body) {
  std::atomic<Index> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  Status first_error;
  const auto loop = [&](int thread) {
    while (!stop) {
      const Index i = next++;
      if (i >= n) return;
      // An exception on a thread would terminate the process.
      Status status = catch_exceptions([&] { return body(thread, i); });
      if (status) continue;
      const std::lock_guard lock(mutex);
      if (first_error) first_error = std::move(status);
      stop = true;
    }
  };
  std::vector<std::thread> pool;
  try {
    for (int t = 1; t < std::min<Index>(threads, n); ++t) pool.emplace_back(loop, t);
    // The system allows no more threads (ulimit -u, a container's limit): those started do all the work.
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {  // no memory for another thread: those started do all the work
  }
  loop(0);
  for (std::thread& t : pool) t.join();
  return first_error;
}

}  // namespace reshard
