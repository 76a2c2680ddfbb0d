// Bounds on the work that clients have in flight, for each one and for all together. What a call
// takes is a lease, whose end gives it back. held_bytes.h bounds bytes.
#ifndef ISOBIT_COMMON_ACCESS_QUOTA_H_
#define ISOBIT_COMMON_ACCESS_QUOTA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit {

// What a call holds, or the upper bound of what may be held.
struct QuotaAmounts {
  int64_t requests = 0;  // calls in flight
  int64_t streams = 0;   // those of them with streamed answers
  int64_t tokens = 0;    // that the calls bring or may generate
};

// Counts per client. Thread-safe.
class Quota : public std::enable_shared_from_this<Quota> {
 public:
  // What a call holds: given back with the last copy. Keeps the Quota alive.
  using Lease = std::shared_ptr<const void>;

  // each: what one client may hold. all: what all clients together may hold.
  static std::shared_ptr<Quota> Create(const QuotaAmounts& each, const QuotaAmounts& all);

  // Takes `amounts`, none of them negative, for `client`. RESOURCE_EXHAUSTED, naming what is held
  // and the limit; with a retry hint, unless the call alone exceeds the limit.
  absl::StatusOr<Lease> Take(const std::string& client, const QuotaAmounts& amounts);

  // The number of clients that hold something.
  size_t num_clients() const;

 private:
  Quota(const QuotaAmounts& each, const QuotaAmounts& all) : each_(each), all_(all) {}
  void GiveBack(const std::string& client, const QuotaAmounts& amounts);

  const QuotaAmounts each_, all_;
  mutable std::mutex mutex_;                  // guards all below
  std::map<std::string, QuotaAmounts> held_;  // by client; without clients that hold nothing
  QuotaAmounts total_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_QUOTA_H_
