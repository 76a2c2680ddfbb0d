// The GPU subcommands of a build without CUDA. See bench_gpu.h.
#include "tools/bench_gpu.h"

namespace isobit::bench {
namespace {

absl::Status Absent() {
  return absl::FailedPreconditionError(
      "this isobit-bench was built without CUDA; build the preset 'cuda' (cmake --preset cuda), "
      "which needs nvcc 13");
}

}  // namespace

absl::Status BenchGemm() { return Absent(); }
absl::Status BenchAttention() { return Absent(); }
absl::Status BenchOps() { return Absent(); }

}  // namespace isobit::bench
