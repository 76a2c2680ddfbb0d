// The calls of a server that are in flight, so that a drain can wait for them while the server
// still answers new calls, and can end calls that take too long.
#ifndef ISOBIT_COMMON_RPC_CALL_COUNT_H_
#define ISOBIT_COMMON_RPC_CALL_COUNT_H_

#include <grpcpp/support/server_interceptor.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "common/access/end_call.h"
#include "common/rpc/steady_time.h"

namespace isobit {

class CallCount {
 public:
  // Returns when no call is in flight, or at the deadline.
  void WaitForNone(SteadyTime deadline);

  // Ends all calls in flight with `status`, and also those whose headers come later. Returns how
  // many are in flight.
  size_t EndAll(const absl::Status& status);

  int64_t calls();

 private:
  friend class CountedCall;

  std::mutex mutex_;  // guards what follows
  std::condition_variable none_;
  // Null until a call's headers have come.
  std::unordered_map<const void*, OpenCall> calls_;
  absl::Status end_;  // with which all calls end; OK: calls go on
};

// An interceptor factory for the server's builder. Counts the calls of the named services; others,
// such as a health watch that never ends, do not count.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CountCallsOf(
    std::vector<std::string> services, std::shared_ptr<CallCount> count);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CALL_COUNT_H_
