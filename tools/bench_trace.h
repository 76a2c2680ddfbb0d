// What ran on a GPU in a span of time, kernel by kernel, from CUPTI's activity records.
#ifndef ISOBIT_TOOLS_BENCH_TRACE_H_
#define ISOBIT_TOOLS_BENCH_TRACE_H_

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

// Records every kernel of the process, those of replayed graphs too, from Start to Stop. One at a
// time. A little time is added to every kernel. INTERNAL: CUPTI refused.
absl::Status StartKernelTrace();
// Waits for the devices, and returns the records by start.
absl::StatusOr<std::vector<KernelRecord>> StopKernelTrace();

}  // namespace isobit::bench

#endif  // ISOBIT_TOOLS_BENCH_TRACE_H_
