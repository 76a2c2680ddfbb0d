// Ranks as threads: what one sends all read, in step, until one of them fails.
#include "common/parallel/thread_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing_support::StatusIs;

void OnEachRank(ThreadGroup& group, int size, const std::function<void(Communicator&)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back([&, r] { body(group.rank(r)); });
  for (std::thread& thread : threads) thread.join();
}

// The documented use: two buffers in turn, no barrier between rounds. TSan holds it to be free of
// races.
TEST(ThreadGroupTest, AlternatingBuffersNeedNoFurtherBarrier) {
  for (const int size : {1, 2, 4, 7}) {
    ThreadGroup group(size);
    std::atomic<int> wrong = 0;
    OnEachRank(group, size, [&](Communicator& comm) {
      std::vector<int> buffers[2] = {std::vector<int>(16), std::vector<int>(16)};
      for (int round = 0; round < 500; ++round) {
        std::vector<int>& mine = buffers[round % 2];
        std::fill(mine.begin(), mine.end(), 1000 * round + comm.rank());
        const auto all = comm.Gather(mine.data(), mine.size() * sizeof(int));
        if (!all.ok() || static_cast<int>(all->size()) != size) {
          ++wrong;
          return;
        }
        for (int r = 0; r < size; ++r) {
          if (static_cast<const int*>((*all)[static_cast<size_t>(r)])[15] != 1000 * round + r)
            ++wrong;
        }
      }
      ISOBIT_EXPECT_OK(comm.Barrier());  // a peer may still read what was sent last
    });
    EXPECT_EQ(wrong, 0) << size << " ranks";
  }
}

TEST(ThreadGroupTest, BarrierWaitsForAll) {
  ThreadGroup group(3);
  std::atomic<int> arrived = 0;
  std::atomic<bool> early = false;
  OnEachRank(group, 3, [&](Communicator& comm) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10 * comm.rank()));
    ++arrived;
    ISOBIT_EXPECT_OK(comm.Barrier());
    if (arrived != 3) early = true;
  });
  EXPECT_FALSE(early);
}

TEST(ThreadGroupTest, AbortFreesThoseWhoWaitAndThoseWhoCome) {
  ThreadGroup group(3);
  OnEachRank(group, 3, [&](Communicator& comm) {
    const auto refused = StatusIs(absl::StatusCode::kInternal, "rank 2 failed");
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      comm.Abort(absl::InternalError("rank 2 failed"));
      comm.Abort(absl::InternalError("too late"));
    } else {
      EXPECT_THAT(comm.Barrier(), refused);
    }
    EXPECT_THAT(comm.Gather(nullptr, 0).status(), refused);
  });
}

}  // namespace
}  // namespace isobit
