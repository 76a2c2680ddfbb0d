// How an all-reduce is divided: a pure function of its shape. All schedules give the same bits and
// differ only in speed, but all ranks must choose the same one, because they write into each
// other's mailboxes.
#ifndef ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_SCHEDULE_H_
#define ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_SCHEDULE_H_

#include <cstdint>

#include "kernels/contract/portable.h"

namespace isobit::cuda {

inline constexpr int64_t kMaxAllReduceHidden = 16384;

struct AllReduceSchedule {
  // One shot: every rank sends its partials to all other ranks, and each adds up all rows. Two
  // shots: a row's partials go to one rank, its owner, which sends the sum to all ranks.
  bool two_shots = false;
  // A row of `hidden` columns is distributed over a cluster of blocks, whose threads have `chunks`
  // times four columns each.
  int chunks = 1;   // 1 or, for two shots of at most four ranks, 2
  int threads = 0;  // of a block: a multiple of 32
  int cluster = 1;  // blocks: 1, 2 or 4

  bool operator==(const AllReduceSchedule&) const = default;
};

// rows >= 0, 1 <= hidden <= kMaxAllReduceHidden, ranks 2, 4 or 8.
AllReduceSchedule ChooseAllReduce(int64_t rows, int64_t hidden, int ranks);

// The values for options that PushOptions leaves open (all_reduce.h), for 2, 4 or 8 ranks.
struct PushTable {
  int64_t rows;
  double bytes_per_us;
};
PushTable PushTableOf(int ranks);

// The i-th of a sum's `rows` rows on rank `rank`, if its own rows (r % ranks == rank) come first.
// Pushed partials travel to all owners at once, so every rank first adds up the rows that it owns.
// In numerical order, its clusters would have to wait for peers' rows in between.
ISOBIT_HD constexpr int OwnRowsFirst(int i, int rows, int rank, int ranks) {
  const int owned = (rows - rank + ranks - 1) / ranks;
  if (i < owned) return rank + ranks * i;
  const int other = (i - owned) % (ranks - 1);
  return (i - owned) / (ranks - 1) * ranks + other + (other < rank ? 0 : 1);
}

// The bytes of a rank's mailbox that the ranks' messages to it fill: rows of whole pieces of 128
// columns.
int64_t MailboxBytes(const AllReduceSchedule& schedule, int64_t rows, int64_t hidden, int ranks);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_SCHEDULE_H_
