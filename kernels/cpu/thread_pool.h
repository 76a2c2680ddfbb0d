// A small fork-join pool: a caller divides a loop among its threads and waits for all of them.
#ifndef ISOBIT_KERNELS_CPU_THREAD_POOL_H_
#define ISOBIT_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace isobit::cpu {

class ThreadPool {
 public:
  // fn(begin, end, worker) handles items [begin, end); worker in [0, num_threads()) selects the
  // scratch memory that this call may use.
  using Body = absl::FunctionRef<void(int64_t begin, int64_t end, int worker)>;

  // num_threads >= 1 includes the caller; 1 starts no thread.
  explicit ThreadPool(int num_threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn on disjoint ranges of at most `grain` items (>= 1) that cover [0, count), and returns
  // when all are done. One loop at a time: only the pool's owner may call it.
  void ParallelFor(int64_t count, int64_t grain, Body fn);

 private:
  void Work(int worker);
  void RunShare(int worker);

  // The current loop, written by the caller before it raises `epoch_`.
  const Body* body_ = nullptr;
  int64_t count_ = 0;
  int64_t grain_ = 1;
  std::atomic<int64_t> next_{0};

  std::atomic<uint32_t> epoch_{0};  // counts loops; a change wakes the workers
  std::atomic<uint32_t> busy_{0};   // workers that have not yet left this loop
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_THREAD_POOL_H_
