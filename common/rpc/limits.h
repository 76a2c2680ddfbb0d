// Message limits and keepalive, stated once for servers and channels: the two sides must agree, or
// a server takes the pings of its own clients for abuse.
#ifndef ISOBIT_COMMON_RPC_LIMITS_H_
#define ISOBIT_COMMON_RPC_LIMITS_H_

namespace isobit {

// Bytes of a request. gRPC refuses a larger one with RESOURCE_EXHAUSTED before it has read it.
inline constexpr int kMaxRequestBytes = 16 << 20;

// Bytes of a response.
inline constexpr int kMaxMessageBytes = 64 << 20;

// Calls in flight on one connection; a client holds further ones back.
inline constexpr int kMaxConcurrentStreams = 4096;

// How often a client pings an idle connection; a server allows pings up to three times as often.
inline constexpr int kKeepaliveTimeMs = 30000;
inline constexpr int kMinPingIntervalMs = 10000;
// The longest pause between two attempts to connect.
inline constexpr int kMaxReconnectBackoffMs = 2000;
// A connection whose ping stays unanswered for this long is dead.
inline constexpr int kKeepaliveTimeoutMs = 10000;
// A new connection that has not finished its handshake, TLS and HTTP/2, by then is closed.
inline constexpr int kHandshakeTimeoutMs = 10000;

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_LIMITS_H_
