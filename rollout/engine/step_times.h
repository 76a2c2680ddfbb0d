// How long the parts of the engine's steps take, on its thread and on the first rank's device.
// Timing a part of the thread's work costs one read of the clock.
#ifndef ISOBIT_ROLLOUT_ENGINE_STEP_TIMES_H_
#define ISOBIT_ROLLOUT_ENGINE_STEP_TIMES_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "kernels/runtime/rank_executor.h"

namespace isobit {

// The parts of the engine thread's work in a step, one after the other.
enum class StepPart {
  kSchedule,  // control calls, and choosing the next step's sequences
  kLaunch,    // planning rows and draws, starting them on the ranks
  kWait,      // waiting for the ranks
  kCommit,    // giving tokens to sequences and sinks
};
inline constexpr std::array<const char*, 4> kStepPartNames = {"schedule", "launch", "wait",
                                                              "commit"};

// What the device does; the members of DeviceTimes.
enum class DevicePart { kForward, kDraw };
inline constexpr std::array<const char*, 2> kDevicePartNames = {"forward", "draw"};

// One thread writes it, any may read it.
class StepTimes {
 public:
  using Clock = std::chrono::steady_clock;

  // enabled: whether to measure times. Steps are always counted.
  explicit StepTimes(bool enabled) : enabled_(enabled) {}

  // Call before the first part of a round.
  void Begin() {
    if (enabled_) last_ = Clock::now();
  }

  // Ends a part and begins the next one.
  void End(StepPart part) {
    if (!enabled_) return;
    const Clock::time_point now = Clock::now();
    std::atomic<int64_t>& sum = nanoseconds_[static_cast<size_t>(part)];
    sum.store(sum.load(std::memory_order_relaxed) +
                  std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count(),
              std::memory_order_relaxed);
    last_ = now;
  }
  void CountStep(const DeviceTimes& times) {
    num_steps_.store(num_steps_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (!enabled_) return;
    Add(DevicePart::kForward, times.forward);
    Add(DevicePart::kDraw, times.draw);
  }

  double seconds(StepPart part) const {
    return 1e-9 * static_cast<double>(
                      nanoseconds_[static_cast<size_t>(part)].load(std::memory_order_relaxed));
  }
  double device_seconds(DevicePart part) const {
    return device_seconds_[static_cast<size_t>(part)].load(std::memory_order_relaxed);
  }
  int64_t num_steps() const { return num_steps_.load(std::memory_order_relaxed); }

 private:
  void Add(DevicePart part, double seconds) {
    std::atomic<double>& sum = device_seconds_[static_cast<size_t>(part)];
    sum.store(sum.load(std::memory_order_relaxed) + seconds, std::memory_order_relaxed);
  }

  const bool enabled_;
  std::array<std::atomic<int64_t>, kStepPartNames.size()> nanoseconds_{};
  std::array<std::atomic<double>, kDevicePartNames.size()> device_seconds_{};
  std::atomic<int64_t> num_steps_ = 0;
  Clock::time_point last_;  // used by the writing thread alone
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_STEP_TIMES_H_
