// The subcommand `engine` of isobit-bench: what the rollout's host code costs, without a model.
#ifndef ISOBIT_BENCH_SERVICES_ENGINE_H_
#define ISOBIT_BENCH_SERVICES_ENGINE_H_

#include "absl/status/status.h"

namespace isobit::bench {

// Reads its flags and prints its tables. INVALID_ARGUMENT: a flag.
absl::Status BenchEngine();

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_SERVICES_ENGINE_H_
