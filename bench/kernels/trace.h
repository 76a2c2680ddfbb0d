// Which kernels ran on a GPU and when, from CUPTI's activity records.
#ifndef ISOBIT_BENCH_KERNELS_TRACE_H_
#define ISOBIT_BENCH_KERNELS_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit::bench {

struct KernelRecord {
  std::string name;  // demangled
  uint32_t device = 0;
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
};

// Records every kernel of the process from Start to Stop, also those of replayed graphs. Only one
// trace at a time. Tracing adds a little time to every kernel. INTERNAL: CUPTI refused.
absl::Status StartKernelTrace();
// Returns the records in the order of their start, once the traced kernels have ended. CUPTI is
// detached: while it is attached, launching a graph takes the host up to 1 ms instead of 5 us.
absl::StatusOr<std::vector<KernelRecord>> StopKernelTrace();

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_TRACE_H_
