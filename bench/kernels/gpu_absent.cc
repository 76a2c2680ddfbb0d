// The GPU subcommands of a build without CUDA: each says that they are missing.
#include "bench/kernels/gpu.h"

namespace isobit::bench {

absl::Status CheckGpuSupport() {
  return absl::FailedPreconditionError(
      "this isobit-bench was built without CUDA; 'make build-gpu' builds one with it, in "
      "build/cuda");
}

absl::Status BenchGemm() { return CheckGpuSupport(); }
absl::Status BenchGrad() { return CheckGpuSupport(); }
absl::Status BenchAttention() { return CheckGpuSupport(); }
absl::Status BenchOps() { return CheckGpuSupport(); }
absl::Status BenchAllReduce() { return CheckGpuSupport(); }
absl::Status BenchDecode() { return CheckGpuSupport(); }
absl::Status BenchScore() { return CheckGpuSupport(); }

}  // namespace isobit::bench
