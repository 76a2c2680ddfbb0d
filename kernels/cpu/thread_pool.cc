// Workers that wait sleep at once: ranks that share cores must not burn each other's time.
#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <chrono>

#include "common/base/check.h"
#include "common/base/spin_wait.h"

namespace isobit::cpu {
namespace {

constexpr std::chrono::microseconds kAsleep(0);

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  ISOBIT_CHECK(num_threads >= 1) << "threads " << num_threads << ", at least 1";
  for (int worker = 1; worker < num_threads; ++worker) {
    workers_.emplace_back([this, worker] { Work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  stopping_ = true;
  ++epoch_;
  WakeAll(epoch_);
  for (std::thread& thread : workers_) thread.join();
}

void ThreadPool::ParallelFor(int64_t count, int64_t grain, Body fn) {
  if (workers_.empty() || count <= grain) {
    for (int64_t begin = 0; begin < count; begin += grain) {
      fn(begin, std::min(count, begin + grain), 0);
    }
    return;
  }
  body_ = &fn;
  count_ = count;
  grain_ = grain;
  next_ = 0;
  // Every worker passes through every loop, so none can carry an old body into the next one.
  busy_ = static_cast<uint32_t>(workers_.size());
  ++epoch_;
  WakeAll(epoch_);
  RunShare(0);
  for (uint32_t busy = busy_; busy != 0;) busy = AwaitChange(busy_, busy, kAsleep);
}

void ThreadPool::Work(int worker) {
  for (uint32_t seen = 0;; ++seen) {
    AwaitChange(epoch_, seen, kAsleep);
    if (stopping_) return;
    RunShare(worker);
    if (--busy_ == 0) WakeOne(busy_);
  }
}

void ThreadPool::RunShare(int worker) {
  for (int64_t begin = next_.fetch_add(grain_); begin < count_; begin = next_.fetch_add(grain_)) {
    (*body_)(begin, std::min(count_, begin + grain_), worker);
  }
}

}  // namespace isobit::cpu
