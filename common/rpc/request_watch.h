// Watches how a server's requests are read: tells the client why one could not be, where gRPC says
// UNIMPLEMENTED without a word, and counts the memory that calls leave free.
#ifndef ISOBIT_COMMON_RPC_REQUEST_WATCH_H_
#define ISOBIT_COMMON_RPC_REQUEST_WATCH_H_

#include <grpcpp/support/server_interceptor.h>

#include <atomic>
#include <cstddef>
#include <memory>

namespace isobit {

// What a server is built with. A call whose request cannot be read, malformed or of too many fields
// (proto/isobit/bounded_request.h), ends with INVALID_ARGUMENT and why, whatever its handler says;
// a stream of requests ends at the first such one. At each call's end `freed_bytes` grows by about
// what it took: its largest request, and what gRPC keeps of a call.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> WatchRequests(
    std::shared_ptr<std::atomic<size_t>> freed_bytes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_REQUEST_WATCH_H_
