// The flags of every service binary: where it listens, TLS, who may call, and how much a client may
// hold.
#ifndef ISOBIT_COMMON_RPC_SERVER_FLAGS_H_
#define ISOBIT_COMMON_RPC_SERVER_FLAGS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/access/held_bytes.h"
#include "common/rpc/server_runner.h"

namespace isobit {

// The options that the parsed flags ask for. INVALID_ARGUMENT names the flag. Other errors: those
// of MakeServerSecurity.
absl::StatusOr<ServerOptions> ServerOptionsFromFlags();

// ByteLimitsOf, applied to `mib`, the value of a service's own `flag`, and to --max_client_share.
absl::StatusOr<ByteLimits> ByteLimitsFromFlags(const char* flag, int64_t mib);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVER_FLAGS_H_
