// The thread barrier: no thread goes on before all have come, and every wait ends.
#include "common/parallel/thread_barrier.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace isobit {
namespace {

absl::Status Fine() { return absl::OkStatus(); }

TEST(ThreadBarrierTest, NobodyGoesOnBeforeAllHaveCome) {
  for (const int ranks : {1, 2, 8}) {
    ThreadBarrier barrier(ranks);
    constexpr int kRounds = 300;
    std::atomic<int> come{0};
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        for (int round = 1; round <= kRounds; ++round) {
          if (round % 100 == r) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          come.fetch_add(1);
          ASSERT_TRUE(barrier.Wait(r, absl::Seconds(30), Fine).ok());
          ASSERT_GE(come.load(), round * ranks);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(come.load(), kRounds * ranks);
  }
}

TEST(ThreadBarrierTest, NamesWhoHasNotCome) {
  ThreadBarrier barrier(2);
  const absl::Status status = barrier.Wait(0, absl::Milliseconds(20), Fine);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "rank 0 waited 20ms for rank 1");
}

TEST(ThreadBarrierTest, EndsWhenAPeerFails) {
  ThreadBarrier barrier(2);
  EXPECT_EQ(barrier.Wait(0, absl::Seconds(30), [] { return absl::DataLossError("gone"); }),
            absl::DataLossError("gone"));
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    barrier.Abort(absl::InternalError("a fault"));
    barrier.Abort(absl::InternalError("a later one"));
  });
  EXPECT_EQ(barrier.Wait(0, absl::Seconds(30), Fine), absl::InternalError("a fault"));
  late.join();
  EXPECT_EQ(barrier.Wait(0, absl::Seconds(30), Fine), absl::InternalError("a fault"));
}

}  // namespace
}  // namespace isobit
