// The all-reduce's table is total and valid: a schedule covers its row, and fits the kernels.
#include "kernels/cuda/sm90/collective/all_reduce_schedule.h"

#include <set>

#include "gtest/gtest.h"

namespace isobit::cuda {
namespace {

TEST(AllReduceScheduleTest, EveryChoiceIsValid) {
  for (int64_t hidden = 1; hidden <= kMaxAllReduceHidden; hidden += hidden < 300 ? 1 : 61) {
    for (const int ranks : {2, 4, 8}) {
      for (const int64_t rows : {1, 2, 3, 8, 9, 16, 32, 33, 64, 96, 97, 256, 1024, 8192}) {
        const AllReduceSchedule s = ChooseAllReduce(rows, hidden, ranks);
        SCOPED_TRACE(testing::Message() << rows << " x " << hidden << ", " << ranks << " ranks");
        ASSERT_TRUE(s.chunks == 1 || (s.chunks == 2 && s.two_shots && ranks <= 4));
        ASSERT_TRUE(s.cluster == 1 || s.cluster == 2 || s.cluster == 4);
        ASSERT_TRUE(s.threads % 32 == 0 && s.threads >= 32 && s.chunks * s.threads <= 1024);
        const int64_t columns = int64_t{4} * s.cluster * s.chunks * s.threads;
        ASSERT_GE(columns, hidden);
        ASSERT_LE(columns, kMaxAllReduceHidden);
      }
    }
  }
}

TEST(AllReduceScheduleTest, LargeSumsGoThroughTheOwner) {
  EXPECT_FALSE(ChooseAllReduce(1, 4096, 8).two_shots);
  EXPECT_FALSE(ChooseAllReduce(8, 4096, 4).two_shots);
  EXPECT_TRUE(ChooseAllReduce(16, 4096, 4).two_shots);
  EXPECT_TRUE(ChooseAllReduce(4096, 64, 2).two_shots);
}

TEST(AllReduceScheduleTest, OwnRowsComeFirstAndEveryRowOnce) {
  for (const int ranks : {2, 4, 8}) {
    for (int rows = 1; rows <= 40; ++rows) {
      for (int rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(testing::Message() << rows << " rows, rank " << rank << " of " << ranks);
        std::set<int> seen;
        bool others = false;
        for (int i = 0; i < rows; ++i) {
          const int row = OwnRowsFirst(i, rows, rank, ranks);
          ASSERT_TRUE(row >= 0 && row < rows);
          ASSERT_TRUE(seen.insert(row).second);
          others = others || row % ranks != rank;
          ASSERT_EQ(others, row % ranks != rank);
        }
      }
    }
  }
}

TEST(AllReduceScheduleTest, MailboxHoldsWhatPeersSend) {
  // One shot: a row of every rank. Two shots: of the rows owned, and the new residual of all.
  EXPECT_EQ(MailboxBytes({.two_shots = false}, 3, 4096, 4), 3 * 4 * 4096 * 4);
  EXPECT_EQ(MailboxBytes({.two_shots = true}, 5, 100, 4), 2 * 4 * 128 * 4 + 5 * 128 * 2);
}

}  // namespace
}  // namespace isobit::cuda
