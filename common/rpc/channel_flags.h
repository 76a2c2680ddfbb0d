// The flags of binaries that call other services: --upstream_tls_*, --upstream_token_file.
#ifndef ISOBIT_COMMON_RPC_CHANNEL_FLAGS_H_
#define ISOBIT_COMMON_RPC_CHANNEL_FLAGS_H_

#include "absl/status/statusor.h"
#include "common/rpc/channel_security.h"

namespace isobit {

// The security that the parsed flags ask for. Errors: those of MakeChannelSecurity.
absl::StatusOr<ChannelSecurity> ChannelSecurityFromFlags();

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CHANNEL_FLAGS_H_
