// A number that changes before, during and after the time awake.
#include "common/base/spin_wait.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "gtest/gtest.h"

namespace {

std::atomic<int> yields{0};

}  // namespace

// In the C library's place.
extern "C" int sched_yield() noexcept {
  ++yields;
  return 0;
}

namespace isobit {
namespace {

using std::chrono::microseconds;

TEST(SpinWaitTest, SeesAChangeThatCameBefore) {
  const std::atomic<uint32_t> number{3};
  EXPECT_EQ(AwaitChange(number, 2, microseconds(0)), 3u);
  EXPECT_EQ(AwaitChange(number, 2, microseconds(50)), 3u);
}

TEST(SpinWaitTest, SeesAChangeAwakeOrAsleep) {
  for (const microseconds awake : {microseconds(0), microseconds(50), microseconds(1000000)}) {
    std::atomic<uint32_t> number{0};
    int handed_over = 0;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      handed_over = 7;
      number.store(1, std::memory_order_release);
      WakeAll(number);
    });
    EXPECT_EQ(AwaitChange(number, 0, awake), 1u);
    EXPECT_EQ(handed_over, 7);
    other.join();
  }
}

// Sanitizers and the time limit judge.
TEST(SpinWaitTest, MissesNoTurn) {
  std::atomic<uint32_t> turn{0};
  constexpr uint32_t kTurns = 20000;
  const auto play = [&](uint32_t mine) {
    for (uint32_t t = mine; t < kTurns; t += 2) {
      for (uint32_t now = turn.load(); now != t;) now = AwaitChange(turn, now, microseconds(2));
      turn.store(t + 1, std::memory_order_release);
      WakeAll(turn);
    }
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
  EXPECT_EQ(turn, kTurns);
}

TEST(SpinWaitTest, NeverYields) {
  yields = 0;
  std::this_thread::yield();
  EXPECT_EQ(yields.exchange(0), 1) << "the control: a call is seen";
  std::atomic<uint32_t> number{0};
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    number.store(1, std::memory_order_release);
    WakeOne(number);
  });
  EXPECT_EQ(AwaitChange(number, 0, microseconds(0)), 1u);
  other.join();
  EXPECT_EQ(yields, 0);
}

}  // namespace
}  // namespace isobit
