// A barrier for the host threads of a group's ranks, fast enough for many uses per millisecond. It
// exchanges no data (communicator.h does).
#ifndef ISOBIT_COMMON_PARALLEL_THREAD_BARRIER_H_
#define ISOBIT_COMMON_PARALLEL_THREAD_BARRIER_H_

#include <atomic>
#include <cstdint>
#include <mutex>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/rank_count.h"

namespace isobit {

class ThreadBarrier {
 public:
  explicit ThreadBarrier(int ranks) : ranks_(ranks) {}

  // Returns when every rank has called Wait as often as this one. Spins for a while, then sleeps.
  // Calls `peers` from time to time; an error from it ends the wait. DEADLINE_EXCEEDED, naming the
  // rank: a rank has not come within `timeout`. After Abort: its reason.
  absl::Status Wait(int rank, absl::Duration timeout, absl::FunctionRef<absl::Status()> peers);

  // Ends all current and later waits with `reason`, an error. Any thread may call it.
  void Abort(const absl::Status& reason);

 private:
  // How often a rank has called Wait, modulo 2^32; each on its own cache line.
  struct alignas(64) Count {
    std::atomic<uint32_t> come = 0;
  };

  bool HasCome(int rank, uint32_t number) const {
    const uint32_t come = counts_[rank].come.load(std::memory_order_acquire);
    return static_cast<int32_t>(come - number) >= 0;
  }

  const int ranks_;
  Count counts_[kMaxRanks];
  std::mutex mutex_;
  absl::Status reason_;  // of Abort
  std::atomic<bool> aborted_ = false;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_THREAD_BARRIER_H_
