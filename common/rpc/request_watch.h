// Watches how a server's requests are parsed: tells clients why a request could not be parsed,
// where gRPC answers UNIMPLEMENTED without a reason, and counts the memory that calls free.
#ifndef ISOBIT_COMMON_RPC_REQUEST_WATCH_H_
#define ISOBIT_COMMON_RPC_REQUEST_WATCH_H_

#include <grpcpp/support/server_interceptor.h>

#include <atomic>
#include <cstddef>
#include <memory>

namespace isobit {

// An interceptor factory for the server's builder. A call whose request cannot be read, because it
// is malformed or has too many fields (proto/isobit/bounded_request.h), ends with INVALID_ARGUMENT
// and the reason, whatever its handler returns. A stream of requests ends at the first such
// request. At the end of each call, `freed_bytes` grows by about the memory that the call took: its
// largest request, and gRPC's own memory for a call.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> WatchRequests(
    std::shared_ptr<std::atomic<size_t>> freed_bytes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_REQUEST_WATCH_H_
