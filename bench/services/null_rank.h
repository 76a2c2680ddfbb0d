// A rank that computes nothing, in a given time: for what a rollout costs without its model.
#ifndef ISOBIT_BENCH_SERVICES_NULL_RANK_H_
#define ISOBIT_BENCH_SERVICES_NULL_RANK_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/runtime/rank_executor.h"

namespace isobit::bench {

// Depth 2. A step ends `step_time` after its launch or after the end of the step before it,
// whichever is later, and draws the same token for every row. Rank 0 adds its rows to `num_rows`.
MakeRank MakeNullRank(std::chrono::microseconds step_time, std::atomic<uint64_t>& num_rows);

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_SERVICES_NULL_RANK_H_
