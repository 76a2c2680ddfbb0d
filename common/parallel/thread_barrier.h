// Where the threads of a group's ranks meet many times a millisecond, to go on together. Not here:
// anything that they exchange (communicator.h).
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

  // Returns when every rank has come as often as this one; who comes late finds the others awake
  // for a while. `peers` is asked now and then, and ends the wait with its error.
  // DEADLINE_EXCEEDED: a rank, which it names, has not come for `timeout`. Or the reason of Abort.
  absl::Status Wait(int rank, absl::Duration timeout, absl::FunctionRef<absl::Status()> peers);

  // Ends all waits, also those to come, with `reason`, an error. From any thread.
  void Abort(const absl::Status& reason);

 private:
  // How often a rank has come, modulo 2^32; a cache line each.
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
