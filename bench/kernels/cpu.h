// The subcommand `cpu` of isobit-bench: the CPU backend's linear layer beside a plain FMA product.
#ifndef ISOBIT_BENCH_KERNELS_CPU_H_
#define ISOBIT_BENCH_KERNELS_CPU_H_

#include "absl/status/status.h"

namespace isobit::bench {

// Reads its flags and prints its tables. INVALID_ARGUMENT: a flag.
absl::Status BenchCpu();

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_CPU_H_
