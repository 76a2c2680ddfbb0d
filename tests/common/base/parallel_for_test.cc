#include "common/base/parallel_for.h"

#include <atomic>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

TEST(ParallelForTest, DoesEveryItemOnceAndNoTwoAtATimeOnOneWorker) {
  for (const size_t max_workers : {1, 3, 1000}) {
    std::vector<std::atomic<int>> done(200);
    std::vector<std::atomic<int>> at_work(max_workers);
    ISOBIT_EXPECT_OK(ParallelFor(done.size(), max_workers, [&](size_t item, size_t worker) {
      EXPECT_EQ(at_work[worker].fetch_add(1), 0);
      ++done[item];
      --at_work[worker];
      return absl::OkStatus();
    }));
    for (const auto& times : done) EXPECT_EQ(times, 1);
  }
  ISOBIT_EXPECT_OK(
      ParallelFor(0, 4, [](size_t, size_t) { return absl::InternalError("no item"); }));
}

TEST(ParallelForTest, AnErrorStartsNothingMore) {
  std::atomic<size_t> started = 0;
  const absl::Status status = ParallelFor(1000, 2, [&](size_t item, size_t /*worker*/) {
    ++started;
    if (item == 5) return absl::DataLossError("item 5");
    // So long that the other worker has not done them all before this error is known.
    absl::SleepFor(absl::Milliseconds(2));
    return absl::OkStatus();
  });
  EXPECT_EQ(status, absl::DataLossError("item 5"));
  EXPECT_LT(started, 1000u);
}

}  // namespace
}  // namespace isobit
