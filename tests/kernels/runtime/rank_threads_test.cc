// Jobs on the threads of all ranks: where and when they run, and what becomes of an error.
#include "kernels/runtime/rank_threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using testing_support::IsOk;

void IgnoreFailure(const absl::Status&) {}

// Where ranks wait for each other. A wait that nobody ends fails after 30 seconds, for all.
class Barrier {
 public:
  explicit Barrier(size_t size) : size_(size) {}

  // Returns once all ranks are here, or with the reason of Abort.
  absl::Status Wait() {
    std::unique_lock lock(mutex_);
    ++num_here_;
    changed_.notify_all();
    const auto ended = [&] { return num_here_ == size_ || !reason_.ok(); };
    if (!changed_.wait_for(lock, std::chrono::seconds(30), ended)) {
      reason_ = absl::DeadlineExceededError("a rank waits for another in vain");
      changed_.notify_all();
    }
    return num_here_ == size_ ? absl::OkStatus() : reason_;
  }

  void Abort(const absl::Status& reason) {
    const std::lock_guard lock(mutex_);
    reason_ = reason;
    changed_.notify_all();
  }

 private:
  const size_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t num_here_ = 0;
  absl::Status reason_;
};

TEST(RankThreadsTest, EveryRankRunsEveryJobOnce) {
  for (const size_t num_ranks : {1, 2, 3, 8}) {
    RankThreads threads(num_ranks, IgnoreFailure);
    // Not atomic: Run must order a rank's jobs, and the caller before and after them.
    std::vector<int> counts(num_ranks);
    constexpr int kJobs = 2000;
    for (int j = 0; j < kJobs; ++j) {
      const auto count = [&](size_t rank) {
        ++counts[rank];
        return absl::OkStatus();
      };
      const bool awake = j % 2 == 0;
      ASSERT_THAT(awake ? threads.Run(count, std::chrono::milliseconds(1)) : threads.Run(count),
                  IsOk());
      ASSERT_THAT(counts, testing::Each(j + 1));
    }
  }
}

TEST(RankThreadsTest, RanksRunAtTheSameTime) {
  constexpr size_t kRanks = 4;
  RankThreads threads(kRanks, IgnoreFailure);
  for (int j = 0; j < 100; ++j) {
    Barrier barrier(kRanks);
    ASSERT_THAT(threads.Run([&](size_t /*rank*/) { return barrier.Wait(); }), IsOk());
  }
}

TEST(RankThreadsTest, ARankKeepsItsThread) {
  constexpr size_t kRanks = 4;
  RankThreads threads(kRanks, IgnoreFailure);
  std::vector<std::set<std::thread::id>> ids(kRanks);
  for (int j = 0; j < 50; ++j) {
    ASSERT_THAT(threads.Run([&](size_t rank) {
      ids[rank].insert(std::this_thread::get_id());
      return absl::OkStatus();
    }),
                IsOk());
  }
  std::set<std::thread::id> all = {std::this_thread::get_id()};
  for (const auto& rank : ids) {
    EXPECT_EQ(rank.size(), 1u);
    all.insert(rank.begin(), rank.end());
  }
  EXPECT_EQ(all.size(), kRanks + 1);  // one for each rank, none of them the caller's
}

TEST(RankThreadsTest, OtherRanksDoNotWaitForOneThatFailed) {
  constexpr size_t kRanks = 3;
  Barrier barrier(kRanks);
  RankThreads threads(kRanks, [&](const absl::Status& failure) { barrier.Abort(failure); });
  const absl::Status broken = absl::InternalError("broken");
  std::vector<absl::Status> ended(kRanks);
  EXPECT_EQ(
      threads.Run([&](size_t rank) { return ended[rank] = rank == 1 ? broken : barrier.Wait(); }),
      broken);
  EXPECT_THAT(ended, testing::Each(broken));
}

// Rank 2 fails first, and rank 0 once it hears of that: the lower rank has the later error.
TEST(RankThreadsTest, TheFirstErrorInTimeIsReturnedAndReportedOnce) {
  Barrier barrier(3);
  std::mutex mutex;
  std::vector<absl::Status> reported;
  RankThreads threads(3, [&](const absl::Status& failure) {
    const std::lock_guard lock(mutex);
    reported.push_back(failure);
    barrier.Abort(failure);
  });
  const absl::Status first = absl::InternalError("first");
  EXPECT_EQ(threads.Run([&](size_t rank) {
    if (rank == 2) return first;
    const absl::Status waited = barrier.Wait();
    return rank == 0 && waited == first ? absl::UnavailableError("second") : absl::OkStatus();
  }),
            first);
  EXPECT_THAT(reported, ElementsAre(first));
}

TEST(RankThreadsTest, AnErrorIsFinal) {
  std::atomic<int> num_reported{0};
  RankThreads threads(2, [&](const absl::Status&) { ++num_reported; });
  const absl::Status broken = absl::InternalError("broken");
  EXPECT_EQ(threads.Run([&](size_t rank) { return rank == 0 ? absl::OkStatus() : broken; }),
            broken);
  std::atomic<int> num_runs{0};
  for (int j = 0; j < 3; ++j) {
    EXPECT_EQ(threads.Run([&](size_t /*rank*/) {
      ++num_runs;
      return absl::UnavailableError("another");
    }),
              broken);
  }
  EXPECT_EQ(num_runs, 0);
  EXPECT_EQ(num_reported, 1);
}

// Sanitizers and the time limit judge.
TEST(RankThreadsTest, MayEndWithoutAJobOrRightAfterOne) {
  for (int i = 0; i < 200; ++i) {
    { const RankThreads threads(3, IgnoreFailure); }
    RankThreads threads(3, IgnoreFailure);
    ASSERT_THAT(threads.Run([](size_t /*rank*/) { return absl::OkStatus(); }), IsOk());
  }
}

// One rank, so that its thread spins before it sleeps on any host of several cores.
TEST(RankThreadsTest, ThreadsWithoutAJobTakeNoCpuTime) {
  RankThreads threads(1, IgnoreFailure);
  ASSERT_THAT(threads.Run([](size_t /*rank*/) { return absl::OkStatus(); }), IsOk());
  const std::clock_t before = std::clock();  // CPU time of all threads of the process
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 20);
}

}  // namespace
}  // namespace isobit
