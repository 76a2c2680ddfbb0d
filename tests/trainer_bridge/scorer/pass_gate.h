// A gate at which the forward passes of a test's scorer stop (HookedOps).
#ifndef ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_PASS_GATE_H_
#define ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_PASS_GATE_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/status/status.h"

namespace isobit {

class PassGate {
 public:
  void Close() { Set(false); }
  void Open() { Set(true); }
  void FailFromNowOn(const absl::Status& failure) {
    const std::lock_guard lock(mutex_);
    failure_ = failure;
  }

  // Waits until the gate is open.
  absl::Status Pass() {
    std::unique_lock lock(mutex_);
    ++arrivals_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    return failure_;
  }

  // Waits, at most a minute, until that many passes have come, open or not.
  bool WaitForArrivals(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::minutes(1), [&] { return arrivals_ >= count; });
  }
  int arrivals() const {
    const std::lock_guard lock(mutex_);
    return arrivals_;
  }

 private:
  void Set(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int arrivals_ = 0;
  absl::Status failure_;
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_PASS_GATE_H_
