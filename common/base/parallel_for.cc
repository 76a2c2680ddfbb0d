// Threads that take the next item until none is left.
#include "common/base/parallel_for.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

namespace isobit {

absl::Status ParallelFor(size_t count, size_t max_workers,
                         absl::FunctionRef<absl::Status(size_t item, size_t worker)> body) {
  std::mutex mutex;  // guards next and status
  size_t next = 0;
  absl::Status status;
  const auto work = [&](size_t worker) {
    std::unique_lock lock(mutex);
    while (status.ok() && next < count) {
      const size_t item = next++;
      lock.unlock();
      const absl::Status result = body(item, worker);
      lock.lock();
      if (status.ok()) status = result;
    }
  };
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t num_workers = std::min({count, max_workers, cores});
  std::vector<std::thread> threads;
  for (size_t worker = 1; worker < num_workers; ++worker) threads.emplace_back(work, worker);
  if (num_workers > 0) work(0);
  for (std::thread& thread : threads) thread.join();
  return status;
}

}  // namespace isobit
