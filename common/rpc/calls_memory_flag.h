// The flag --max_calls_mb, for services that bound only the memory of their calls.
#ifndef ISOBIT_COMMON_RPC_CALLS_MEMORY_FLAG_H_
#define ISOBIT_COMMON_RPC_CALLS_MEMORY_FLAG_H_

#include "absl/status/statusor.h"
#include "common/access/held_bytes.h"

namespace isobit {

// The limits that --max_calls_mb and --max_client_share set, once parsed. INVALID_ARGUMENT names
// the flag.
absl::StatusOr<ByteLimits> CallsMemoryFromFlags();

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CALLS_MEMORY_FLAG_H_
