// Bounds the health watches that clients hold open. Every caller may use health, and gRPC's own
// service allows a connection as many watches as calls; each takes about 28 KiB.
#ifndef ISOBIT_COMMON_ACCESS_HEALTH_WATCHES_H_
#define ISOBIT_COMMON_ACCESS_HEALTH_WATCHES_H_

#include <grpcpp/support/server_interceptor.h>

#include <cstdint>
#include <memory>

#include "common/access/quota.h"

namespace isobit {

// By default an address may have this many connections, and a client needs one watch for each.
// Watches do not count in clients' quotas, which callers without a role must not use up.
inline constexpr int64_t kMaxClientHealthWatches = 1024;
inline constexpr int64_t kMaxHealthWatches = 4096;

// These bounds; servers that share a quota share the bounds.
std::shared_ptr<Quota> HealthWatchQuota();

// Ends further watches with RESOURCE_EXHAUSTED. Clients are named by held_bytes.h's ClientOf.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> LimitHealthWatches(
    std::shared_ptr<Quota> quota);

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_HEALTH_WATCHES_H_
