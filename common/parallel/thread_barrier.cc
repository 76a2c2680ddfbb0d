// Counts of arrivals, which every rank reads: first spinning, then asleep.
#include "common/parallel/thread_barrier.h"

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/spin_wait.h"
#include "common/base/status_macros.h"

namespace isobit {

absl::Status ThreadBarrier::Wait(int rank, absl::Duration timeout,
                                 absl::FunctionRef<absl::Status()> peers) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kAwake(200);
  const uint32_t number = counts_[rank].come.load(std::memory_order_relaxed) + 1;
  counts_[rank].come.store(number, std::memory_order_release);
  const Clock::time_point begin = Clock::now();
  for (int q = 0; q < ranks_; ++q) {
    while (!HasCome(q, number)) {
      if (aborted_.load(std::memory_order_relaxed)) {
        const std::lock_guard lock(mutex_);
        return reason_;
      }
      const Clock::duration waited = Clock::now() - begin;
      if (waited < kAwake) {
        for (int i = 0; i < 16; ++i) RelaxCore();
        continue;
      }
      ISOBIT_RETURN_IF_ERROR(peers());
      if (waited > absl::ToChronoNanoseconds(timeout)) {
        return absl::DeadlineExceededError(absl::StrCat(
            "rank ", rank, " waited ", absl::FormatDuration(timeout), " for rank ", q));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  return absl::OkStatus();
}

void ThreadBarrier::Abort(const absl::Status& reason) {
  const std::lock_guard lock(mutex_);
  if (reason_.ok()) reason_ = reason;
  aborted_.store(true, std::memory_order_relaxed);
}

}  // namespace isobit
