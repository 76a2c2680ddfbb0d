// A connection to another process that may not be there yet, may be slow or may never answer: every
// wait has a deadline, and ends early when its caller gives up. No TLS: it is used for the
// protocols that trainers use within a cluster.
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

// How long to wait for another process, and whether to go on waiting.
struct PeerWait {
  std::chrono::steady_clock::time_point deadline;
  // Called every few milliseconds while waiting; an error from it ends the wait. May be null.
  std::function<absl::Status()> check = nullptr;

  // DEADLINE_EXCEEDED, naming `what`: the deadline is over. Also the errors of `check`.
  absl::Status Check(absl::string_view what) const;
};

// Used by one thread at a time. Errors name the other side. UNAVAILABLE: it has closed the
// connection, or the network failed. DEADLINE_EXCEEDED; errors of PeerWait::check.
class TcpConnection {
 public:
  // Tries again until a process listens there. `who` names the other side in errors. UNAVAILABLE:
  // the host does not exist. Looking up a name has no time limit of our own.
  static absl::StatusOr<TcpConnection> Connect(const std::string& who, const std::string& host,
                                               int port, const PeerWait& wait);

  absl::Status Send(absl::string_view bytes, const PeerWait& wait);
  // Fills out[0, bytes).
  absl::Status Receive(void* out, size_t bytes, const PeerWait& wait);

 private:
  TcpConnection(std::string peer, Descriptor socket)
      : peer_(std::move(peer)), socket_(std::move(socket)) {}

  // Waits until the socket is ready for poll()'s `events`.
  absl::Status Await(short events, const PeerWait& wait) const;

  std::string peer_;  // for errors
  Descriptor socket_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_TCP_CONNECTION_H_
