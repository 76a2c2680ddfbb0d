// The spin, then a futex.
#include "common/base/spin_wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace isobit {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

void Futex(const std::atomic<uint32_t>& number, int operation, uint32_t value) {
  syscall(SYS_futex, &number, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

uint32_t AwaitChange(const std::atomic<uint32_t>& number, uint32_t old,
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
    Futex(number, FUTEX_WAIT, old);  // returns at once if the number is no longer the old one
    now = number.load(std::memory_order_acquire);
  }
  return now;
}

void WakeOne(const std::atomic<uint32_t>& number) { Futex(number, FUTEX_WAKE, 1); }

void WakeAll(const std::atomic<uint32_t>& number) { Futex(number, FUTEX_WAKE, INT_MAX); }

}  // namespace isobit
