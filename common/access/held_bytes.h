// Bounds on the memory that a service holds for clients, for each one and for all together.
#ifndef ISOBIT_COMMON_ACCESS_HELD_BYTES_H_
#define ISOBIT_COMMON_ACCESS_HELD_BYTES_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit {

// gRPC's memory for one call without messages: some 28 KiB, as tests/attack/memory_test.py shows.
inline constexpr size_t kCallBytes = 32 << 10;

// The caller's name: the one that its certificate or bearer token proves, else its address without
// the port.
std::string ClientOf(const grpc::ServerContextBase& context);

// Frees the contents of `message`. gRPC keeps a request until its call ends, although a handler
// that has read it no longer needs it.
template <typename Message>
void DropContent(const Message* message) {
  Message().Swap(const_cast<Message*>(message));  // gRPC's own object, which is not const
}

struct ByteLimits {
  size_t total;
  double client_share = 1.0;  // the share of `total` for one client, in (0, 1]
};

// Limits from two flags, for mains. INVALID_ARGUMENT names the flag: `mib` is not in [1, 2^20], or
// `client_share`, the value of --max_client_share, is not in [0.001, 1].
absl::StatusOr<ByteLimits> ByteLimitsOf(const char* flag, int64_t mib, double client_share);

class HeldBytes;

// Thread-safe.
class ByteBudget : public std::enable_shared_from_this<ByteBudget> {
 public:
  // what: the name of what is held, for errors, such as "results that wait to be read".
  ByteBudget(std::string what, const ByteLimits& limits);

  // Opens an account of `client` that holds nothing yet.
  HeldBytes Open(const std::string& client);

  // The bytes that all clients hold.
  size_t held() const { return total_; }

 private:
  friend class HeldBytes;
  using Account = std::atomic<size_t>;  // of one client's bytes

  const std::string what_;
  const size_t max_total_;
  const size_t max_client_;
  std::atomic<size_t> total_{0};
  std::mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<Account>> accounts_;  // guarded by mutex_
};

// What one call holds of a budget. The destructor gives it back. Not thread-safe.
class HeldBytes {
 public:
  HeldBytes() = default;  // without a budget: takes any size
  HeldBytes(HeldBytes&& other) noexcept = default;
  HeldBytes& operator=(HeldBytes&& other) noexcept;
  ~HeldBytes();

  // Holds `bytes` from now on, instead of what it held. RESOURCE_EXHAUSTED: a bound does not allow
  // it; it then keeps what it held. The error has a retry hint, unless `bytes` alone exceeds a
  // bound. Holding less never fails.
  absl::Status Resize(size_t bytes);

 private:
  friend class ByteBudget;
  HeldBytes(std::shared_ptr<ByteBudget> budget, std::shared_ptr<ByteBudget::Account> account)
      : budget_(std::move(budget)), account_(std::move(account)) {}

  std::shared_ptr<ByteBudget> budget_;
  std::shared_ptr<ByteBudget::Account> account_;
  size_t bytes_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_HELD_BYTES_H_
