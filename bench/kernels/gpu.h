// The subcommands of isobit-bench that need a GPU. In a build without CUDA each fails.
#ifndef ISOBIT_BENCH_KERNELS_GPU_H_
#define ISOBIT_BENCH_KERNELS_GPU_H_

#include "absl/status/status.h"

namespace isobit::bench {

// FAILED_PRECONDITION: built without CUDA, and so without the GPU subcommands' flags.
absl::Status CheckGpuSupport();

// Each reads its flags, prints its tables and writes --json. INVALID_ARGUMENT: a flag.
// FAILED_PRECONDITION: as CheckGpuSupport, or no device that the kernels run on.
absl::Status BenchGemm();
absl::Status BenchGrad();
absl::Status BenchAttention();
absl::Status BenchOps();
absl::Status BenchAllReduce();
absl::Status BenchDecode();
absl::Status BenchScore();

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_GPU_H_
