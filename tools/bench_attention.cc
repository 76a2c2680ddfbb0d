// The subcommand `attention` of isobit-bench.
#include "tools/bench_gpu.h"

namespace isobit::bench {

absl::Status BenchAttention() { return absl::UnimplementedError("attention: no kernel yet"); }

}  // namespace isobit::bench
