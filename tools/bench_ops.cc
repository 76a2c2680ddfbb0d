// The subcommand `ops` of isobit-bench.
#include "tools/bench_gpu.h"

namespace isobit::bench {

absl::Status BenchOps() { return absl::UnimplementedError("ops: no kernel yet"); }

}  // namespace isobit::bench
