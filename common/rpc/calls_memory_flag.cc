// Defines --max_calls_mb.
#include "common/rpc/calls_memory_flag.h"

#include <cstdint>

#include "absl/flags/flag.h"
#include "common/rpc/server_flags.h"

ABSL_FLAG(int64_t, max_calls_mb, 1024,
          "Memory of calls, in MiB: of requests that wait or run, and of results that clients have "
          "not read; what needs more ends with RESOURCE_EXHAUSTED.");

namespace isobit {

absl::StatusOr<ByteLimits> CallsMemoryFromFlags() {
  return ByteLimitsFromFlags("max_calls_mb", absl::GetFlag(FLAGS_max_calls_mb));
}

}  // namespace isobit
