// Waits for an atomic number to change, first spinning, then asleep. For threads that hand work to
// each other many times per millisecond but must not burn a core when there is no work.
#ifndef ISOBIT_COMMON_BASE_SPIN_WAIT_H_
#define ISOBIT_COMMON_BASE_SPIN_WAIT_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace isobit {

// Tells the core that this is a spin loop.
inline void RelaxCore() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `number` differs from `old`, and returns it. Spins for the time `awake`, then sleeps.
// After changing `number`, the other thread must call WakeOne or WakeAll. Loads with acquire order.
//
// std::atomic's own wait calls sched_yield several times before it sleeps. If other processes keep
// all cores busy, each of these calls can cost a time slice.
// INVARIANT: no wait yields (SpinWaitTest.NeverYields).
uint32_t AwaitChange(const std::atomic<uint32_t>& number, uint32_t old,
                     std::chrono::microseconds awake);

// Wake one thread, or all, that sleep until `number` changes. `number` need not exist any more.
void WakeOne(const std::atomic<uint32_t>& number);
void WakeAll(const std::atomic<uint32_t>& number);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_SPIN_WAIT_H_
