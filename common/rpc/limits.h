// Message limits and keepalive, stated once for servers and channels: the two sides must agree, or
// a server takes the pings of its own clients for abuse.
#ifndef ISOBIT_COMMON_RPC_LIMITS_H_
#define ISOBIT_COMMON_RPC_LIMITS_H_

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"

namespace isobit {

// What gRPC accepts, in bytes, in either direction. It refuses more with RESOURCE_EXHAUSTED before
// any code of ours runs.
inline constexpr int kMaxMessageBytes = 64 << 20;

// What a service accepts as a request, in bytes.
inline constexpr int kMaxRequestBytes = 16 << 20;

// A client pings an idle connection that often; a server allows pings up to three times as often.
inline constexpr int kKeepaliveTimeMs = 30000;
inline constexpr int kMinPingIntervalMs = 10000;
// The longest pause between two attempts to connect.
inline constexpr int kMaxReconnectBackoffMs = 2000;
// A connection whose ping stays unanswered that long is dead.
inline constexpr int kKeepaliveTimeoutMs = 10000;
// A new connection that has not finished its handshake, TLS and HTTP/2, by then is closed.
inline constexpr int kHandshakeTimeoutMs = 10000;

// INVALID_ARGUMENT if `request` serialises to more than kMaxRequestBytes.
absl::Status CheckRequestSize(const google::protobuf::MessageLite& request);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_LIMITS_H_
