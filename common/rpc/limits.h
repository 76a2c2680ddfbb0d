// Message limits and keepalive for both servers and channels. The two sides must agree, or a server
// treats the pings of its own clients as abuse.
#ifndef ISOBIT_COMMON_RPC_LIMITS_H_
#define ISOBIT_COMMON_RPC_LIMITS_H_

namespace isobit {

// The size of a request. gRPC refuses larger ones with RESOURCE_EXHAUSTED without reading them.
inline constexpr int kMaxRequestBytes = 16 << 20;

// The size of a response.
inline constexpr int kMaxMessageBytes = 64 << 20;

// Calls in flight on one connection; the client delays further ones.
inline constexpr int kMaxConcurrentStreams = 4096;

// How often a client pings an idle connection; a server allows pings up to three times as often.
inline constexpr int kKeepaliveTimeMs = 30000;
inline constexpr int kMinPingIntervalMs = 10000;
// The longest pause between two attempts to connect.
inline constexpr int kMaxReconnectBackoffMs = 2000;
// A connection whose ping stays unanswered for this long is dead.
inline constexpr int kKeepaliveTimeoutMs = 10000;
// A new connection must have finished its handshake, TLS and HTTP/2, by then, or is closed.
inline constexpr int kHandshakeTimeoutMs = 10000;

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_LIMITS_H_
