// Counts the calls of a server that are in flight, so that a drain can wait for them while the
// server still answers new calls.
#ifndef ISOBIT_COMMON_RPC_CALL_COUNT_H_
#define ISOBIT_COMMON_RPC_CALL_COUNT_H_

#include <grpcpp/support/server_interceptor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace isobit {

class CallCount {
 public:
  // Returns when no call is in flight, or at the deadline.
  void WaitForNone(std::chrono::system_clock::time_point deadline);

  int64_t calls();

 private:
  friend class CountedCall;

  std::mutex mutex_;
  std::condition_variable none_;
  int64_t calls_ = 0;  // guarded by mutex_
};

// An interceptor factory for the server's builder, which counts the calls of the named services.
// Other calls, such as a health watch that never ends, do not count.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CountCallsOf(
    std::vector<std::string> services, std::shared_ptr<CallCount> count);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CALL_COUNT_H_
