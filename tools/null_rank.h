// A rank that computes nothing in a given time: what a rollout costs without a model.
#ifndef ISOBIT_TOOLS_NULL_RANK_H_
#define ISOBIT_TOOLS_NULL_RANK_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/runtime/rank_executor.h"

namespace isobit::bench {

// Depth 2. A step takes `step_time` from its launch, or from the end of the one before it, and
// draws the same token for every row. Rank 0 counts in `num_rows` those it has computed.
MakeRank MakeNullRank(std::chrono::microseconds step_time, std::atomic<uint64_t>& num_rows);

}  // namespace isobit::bench

#endif  // ISOBIT_TOOLS_NULL_RANK_H_
