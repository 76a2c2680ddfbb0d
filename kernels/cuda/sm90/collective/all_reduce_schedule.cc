// The table. It was measured on two and four H200 over NVLink at hidden 4096, alone and between the
// linear layers of a decode step. Other sizes follow from it by their bytes and threads.
#include "kernels/cuda/sm90/collective/all_reduce_schedule.h"

#include <algorithm>

#include "common/base/round_up.h"

namespace isobit::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int64_t kQuad = 4;                   // columns of a vector
constexpr int64_t kOneShotBytes = 400 * 1024;  // that a rank may send in one shot
constexpr int64_t kFewRows = 48;  // up to so many, the GPU holds four small blocks each

// Spreads a row over the smallest cluster whose blocks have at most `most_threads` threads, but
// over no more than four blocks.
AllReduceSchedule Spread(bool two_shots, int64_t hidden, int chunks, int64_t most_threads) {
  AllReduceSchedule schedule = {.two_shots = two_shots, .chunks = chunks};
  const int64_t quads = CeilDiv(hidden, kQuad);
  while (schedule.cluster < 4 && CeilDiv(quads, chunks * schedule.cluster) > most_threads) {
    schedule.cluster *= 2;
  }
  schedule.threads =
      static_cast<int>(CeilDiv(quads, int64_t{chunks} * schedule.cluster * kWarp) * kWarp);
  return schedule;
}

}  // namespace

AllReduceSchedule ChooseAllReduce(int64_t rows, int64_t hidden, int ranks) {
  const int64_t sent = rows * hidden * static_cast<int64_t>(sizeof(float)) * (ranks - 1);
  // Small blocks leave room on every multiprocessor, so that the next kernel can fetch its weights.
  if (sent <= kOneShotBytes) return Spread(false, hidden, 1, 256);
  if (rows <= kFewRows) return Spread(true, hidden, 1, 256);
  // Where the links are the limit, each thread has more in flight.
  const bool many = (ranks == 2 && rows > 256) || (ranks == 4 && rows > 2048);
  return many ? Spread(true, hidden, 2, 512) : Spread(true, hidden, 1, 1024);
}

PushTable PushTableOf(int ranks) {
  // Two ranks: pushes won at every number of rows up to 2048, and tiles chosen for them won nothing
  // in whole steps. Four send more of their rows, so should win more; measured up to 64 rows.
  constexpr PushTable kTwo = {.rows = 2048, .bytes_per_us = 0};
  constexpr PushTable kFour = {.rows = 512, .bytes_per_us = 0};
  constexpr PushTable kEight = {.rows = 64, .bytes_per_us = 0};
  return ranks == 2 ? kTwo : ranks == 4 ? kFour : kEight;
}

int64_t MailboxBytes(const AllReduceSchedule& schedule, int64_t rows, int64_t hidden, int ranks) {
  constexpr int64_t kPiece = kWarp * kQuad;
  const int64_t columns = CeilDiv(hidden, kPiece) * kPiece;
  if (!schedule.two_shots) return rows * ranks * columns * 4;
  return CeilDiv(rows, ranks) * ranks * columns * 4 + rows * columns * 2;
}

}  // namespace isobit::cuda
