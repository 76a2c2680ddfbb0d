// Measures all schedules that may be the fastest; the table of schedules is fitted to these times.
#ifndef ISOBIT_BENCH_KERNELS_GEMM_SCHEDULES_H_
#define ISOBIT_BENCH_KERNELS_GEMM_SCHEDULES_H_

#include "absl/status/status.h"
#include "bench/kernels/gemm_cases.h"
#include "bench/kernels/harness.h"

namespace isobit::bench {

// Races cuBLAS and every candidate schedule, first the one that isobit chooses, and prints their
// microseconds as a line of JSON: medians of three short rounds, accurate to some 2 %.
absl::Status SweepSchedules(Harness& harness, const Calls& calls);

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_GEMM_SCHEDULES_H_
