// The families of isobit-bench grad: the ops of a training step, each family with a table of its
// own.
#ifndef ISOBIT_BENCH_KERNELS_GRAD_H_
#define ISOBIT_BENCH_KERNELS_GRAD_H_

#include "absl/status/status.h"
#include "bench/kernels/harness.h"
#include "nlohmann/json.hpp"

namespace isobit::bench {

// Each prints its table and adds its cases to `report`.
absl::Status BenchProducts(Harness& harness, nlohmann::json& report);
absl::Status BenchTrainingAttention(Harness& harness, nlohmann::json& report);
absl::Status BenchRows(Harness& harness, nlohmann::json& report);

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_GRAD_H_
