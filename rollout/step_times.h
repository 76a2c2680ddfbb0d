// How long the parts of the engine's steps have taken. An addition costs a look at the clock.
#ifndef ISOBIT_ROLLOUT_STEP_TIMES_H_
#define ISOBIT_ROLLOUT_STEP_TIMES_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace isobit {

// What the engine's thread does, one after the other.
enum class StepPart {
  kSchedule,  // control calls, and the choice of the next step's sequences
  kLaunch,    // rows and draws of the step, and its start on the ranks
  kWait,      // for the ranks
  kCommit,    // the tokens, to their sequences and sinks
};
inline constexpr std::array<const char*, 4> kStepPartNames = {"schedule", "launch", "wait",
                                                              "commit"};

// Written by one thread, read by any.
class StepTimes {
 public:
  using Clock = std::chrono::steady_clock;

  // To be called before the first part of a round.
  void Begin() { last_ = Clock::now(); }

  // A part has ended. The next one begins.
  void End(StepPart part) {
    const Clock::time_point now = Clock::now();
    std::atomic<int64_t>& sum = nanoseconds_[static_cast<size_t>(part)];
    sum.store(sum.load(std::memory_order_relaxed) +
                  std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count(),
              std::memory_order_relaxed);
    last_ = now;
  }
  void CountStep() {
    num_steps_.store(num_steps_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  double seconds(StepPart part) const {
    return 1e-9 * static_cast<double>(
                      nanoseconds_[static_cast<size_t>(part)].load(std::memory_order_relaxed));
  }
  int64_t num_steps() const { return num_steps_.load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<int64_t>, kStepPartNames.size()> nanoseconds_{};
  std::atomic<int64_t> num_steps_ = 0;
  Clock::time_point last_;  // of the writing thread
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_STEP_TIMES_H_
