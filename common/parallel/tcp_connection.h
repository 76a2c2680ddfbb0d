// A connection to another process that may not be there yet, may be slow or may never answer: every
// wait has a deadline, and ends when its caller wants no more. No TLS: it is for what trainers
// speak to each other within a cluster.
#ifndef ISOBIT_COMMON_PARALLEL_TCP_CONNECTION_H_
#define ISOBIT_COMMON_PARALLEL_TCP_CONNECTION_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/descriptor.h"

namespace isobit {

// How long to wait for another process, and whether still.
struct PeerWait {
  std::chrono::steady_clock::time_point deadline;
  // Called every few milliseconds of a wait, which an error ends. Null: none.
  std::function<absl::Status()> check = nullptr;

  // DEADLINE_EXCEEDED, with `what`, after the deadline; what `check` says.
  absl::Status Check(absl::string_view what) const;
};

// Used by one thread at a time. Errors name the other side. UNAVAILABLE: it has closed the
// connection, or the network failed. DEADLINE_EXCEEDED, and those of PeerWait::check.
class TcpConnection {
 public:
  // Tries again until somebody listens there. `who` names the other side in errors. UNAVAILABLE: no
  // such host. A name is looked up without a bound of our own.
  static absl::StatusOr<TcpConnection> Connect(const std::string& who, const std::string& host,
                                               int port, const PeerWait& wait);

  absl::Status Send(absl::string_view bytes, const PeerWait& wait);
  // Fills out[0, bytes).
  absl::Status Receive(void* out, size_t bytes, const PeerWait& wait);

 private:
  TcpConnection(std::string peer, Descriptor socket)
      : peer_(std::move(peer)), socket_(std::move(socket)) {}

  // Waits until the socket is ready for `events` of poll().
  absl::Status Await(short events, const PeerWait& wait) const;

  std::string peer_;  // for errors
  Descriptor socket_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_TCP_CONNECTION_H_
