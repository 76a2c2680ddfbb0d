// The subcommand `metrics` of isobit-bench: what measuring a step costs the rollout.
#ifndef ISOBIT_BENCH_SERVICES_METRICS_H_
#define ISOBIT_BENCH_SERVICES_METRICS_H_

#include "absl/status/status.h"

namespace isobit::bench {

// Reads its flags and prints its tables. INVALID_ARGUMENT: a flag.
absl::Status BenchMetrics();

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_SERVICES_METRICS_H_
