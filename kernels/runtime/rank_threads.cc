// Hands jobs over by counters that both sides wait on. See rank_threads.h.
#include "kernels/runtime/rank_threads.h"

#include <utility>

#include "common/base/check.h"
#include "common/base/spin_wait.h"

namespace isobit {
namespace {

constexpr std::chrono::microseconds kAwake(50);

}  // namespace

RankThreads::RankThreads(size_t num_ranks, std::function<void(const absl::Status&)> on_failure)
    : on_failure_(std::move(on_failure)),
      awake_(std::thread::hardware_concurrency() > num_ranks ? kAwake
                                                             : std::chrono::microseconds(0)) {
  ISOBIT_CHECK(num_ranks > 0);
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    threads_.emplace_back([this, rank] { Serve(rank); });
  }
}

RankThreads::~RankThreads() {
  Publish(nullptr);
  for (std::thread& thread : threads_) thread.join();
}

absl::Status RankThreads::Run(absl::FunctionRef<absl::Status(size_t)> job,
                              std::chrono::microseconds awake) {
  if (!failure_.ok()) return failure_;
  auto num_busy = static_cast<uint32_t>(threads_.size());
  num_busy_.store(num_busy, std::memory_order_relaxed);
  Publish(&job);
  while (num_busy > 0) num_busy = AwaitChange(num_busy_, num_busy, awake);
  return failure_;
}

void RankThreads::Publish(const Job* job) {
  job_ = job;
  num_jobs_.fetch_add(1, std::memory_order_release);
  WakeAll(num_jobs_);
}

void RankThreads::Serve(size_t rank) {
  uint32_t num_jobs = 0;
  while (true) {
    num_jobs = AwaitChange(num_jobs_, num_jobs, awake_);
    if (job_ == nullptr) return;
    const absl::Status status = (*job_)(rank);
    if (!status.ok()) Fail(status);
    if (num_busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) WakeOne(num_busy_);
  }
}

void RankThreads::Fail(const absl::Status& status) {
  {
    const std::lock_guard lock(failure_mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  on_failure_(status);
}

}  // namespace isobit
