// Takes the place of the C library's clock_gettime. See wall_clock.h.
#include "tests/support/wall_clock.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

std::atomic<int64_t> ahead_s{0};

}  // namespace

extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t id,
                                                                    timespec* time) noexcept {
  const int result = static_cast<int>(syscall(SYS_clock_gettime, id, time));
  if (id == CLOCK_REALTIME && result == 0) time->tv_sec += ahead_s;
  return result;
}

namespace isobit::testing_support {

void SetWallClockAhead(std::chrono::seconds ahead) { ahead_s = ahead.count(); }

}  // namespace isobit::testing_support
