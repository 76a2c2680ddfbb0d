// The part of isobit-bench allreduce that measures row-parallel layers together with their sums.
#ifndef ISOBIT_BENCH_KERNELS_PUSH_H_
#define ISOBIT_BENCH_KERNELS_PUSH_H_

#include "absl/status/status.h"
#include "bench/kernels/ranks.h"
#include "nlohmann/json.hpp"

namespace isobit::bench {

// Races an 8B model's o and down, each with its sum over the team's ranks: partial sums stored;
// pushed; and pushed by tiles that are chosen for it. Prints a table and adds its lines to
// report["push"]. INVALID_ARGUMENT: --push_rows or --push_gb.
absl::Status BenchPush(RankTeam& team, nlohmann::json& report);

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_PUSH_H_
