// A thread that repeats, and its end, from outside and from within.
#include "common/base/repeating_thread.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "gtest/gtest.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;

TEST(RepeatingThreadTest, RunsUntilItIsDestroyed) {
  std::atomic<int> num_runs{0};
  {
    const RepeatingThread thread(milliseconds(1), [&] { ++num_runs; });
    while (num_runs < 3) std::this_thread::yield();
  }
  const int at_end = num_runs;
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(num_runs, at_end);
}

TEST(RepeatingThreadTest, IsNotWaitedForWhileItRests) {
  const RepeatingThread thread(std::chrono::hours(1), [] { FAIL(); });
}

// As where the run lets go of the last reference to the owner of the thread.
TEST(RepeatingThreadTest, ARunMayDestroyIt) {
  const auto kept = std::make_shared<std::unique_ptr<RepeatingThread>>();
  std::atomic<bool> is_made{false};
  std::atomic<bool> has_ended{false};  // the thread has let go of what it runs
  std::shared_ptr<void> token(nullptr, [&](void*) { has_ended = true; });
  *kept = std::make_unique<RepeatingThread>(milliseconds(1),
                                            [&is_made, kept, token = std::move(token)] {
                                              while (!is_made) std::this_thread::yield();
                                              kept->reset();
                                            });
  is_made = true;
  while (!has_ended) std::this_thread::yield();
  EXPECT_EQ(*kept, nullptr);
}

}  // namespace
}  // namespace isobit
