// Waiting for an atomic number to change, first awake, then asleep: for threads that hand work to
// each other many times a millisecond and must not burn a core when there is none.
#ifndef ISOBIT_COMMON_PARALLEL_SPIN_WAIT_H_
#define ISOBIT_COMMON_PARALLEL_SPIN_WAIT_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace isobit {

// Tells the core that this is a loop that waits.
inline void RelaxCore() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `number` differs from `old`, and returns it. Polls for the time `awake`, then sleeps.
// Whoever changes `number` must call notify_all (or notify_one) afterwards. Loads with acquire
// order.
inline uint32_t AwaitChange(const std::atomic<uint32_t>& number, uint32_t old,
                            std::chrono::microseconds awake) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + awake;
  uint32_t now = number.load(std::memory_order_acquire);
  while (now == old && Clock::now() < end) {
    for (int i = 0; i < 16 && now == old; ++i) {
      RelaxCore();
      now = number.load(std::memory_order_acquire);
    }
  }
  while (now == old) {
    number.wait(old, std::memory_order_acquire);
    now = number.load(std::memory_order_acquire);
  }
  return now;
}

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_SPIN_WAIT_H_
