// Bounds the health watches that clients hold open. Health is open to all, and gRPC's own service
// lets a connection have as many watches as calls, each for some 28 KiB.
#ifndef ISOBIT_COMMON_RPC_HEALTH_WATCHES_H_
#define ISOBIT_COMMON_RPC_HEALTH_WATCHES_H_

#include <grpcpp/support/server_interceptor.h>

#include <cstdint>
#include <memory>

namespace isobit {

// By default an address may have this many connections, and a client watches health once for each.
// Watches do not count in the clients' quotas: callers without a role must not use those up.
inline constexpr int64_t kMaxClientHealthWatches = 1024;
inline constexpr int64_t kMaxHealthWatches = 4096;

// Ends watches beyond these with RESOURCE_EXHAUSTED. Clients are those of held_bytes.h's ClientOf.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> LimitHealthWatches();

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_HEALTH_WATCHES_H_
