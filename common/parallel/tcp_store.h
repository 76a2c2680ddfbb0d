// A client of PyTorch's TCPStore, which is where trainers meet: rank 0 of a group serves it, and
// puts the group's id there. It speaks what the store of PyTorch 2.1 and later does. Here is only
// what a rank needs that joins a group; what values mean is somebody else's business.
#ifndef ISOBIT_COMMON_PARALLEL_TCP_STORE_H_
#define ISOBIT_COMMON_PARALLEL_TCP_STORE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/parallel/tcp_connection.h"

namespace isobit {

// Used by one thread. Errors: those of TcpConnection; INVALID_ARGUMENT: an answer that no such
// store gives, or one that is too long.
class TcpStore {
 public:
  // wait: of all calls together.
  static absl::StatusOr<TcpStore> Connect(const std::string& host, int port, const PeerWait& wait);

  // Tells the server that one more of its workers is there: it waits for all of them.
  absl::Status CheckIn();

  // Waits until somebody has set the key, and returns its value, of at most `max_bytes`.
  absl::StatusOr<std::string> Get(absl::string_view key, size_t max_bytes);

 private:
  TcpStore(TcpConnection connection, const PeerWait& wait)
      : connection_(std::move(connection)), wait_(wait) {}

  TcpConnection connection_;
  PeerWait wait_;
};

// The id of the group of a trainer that serves a store there, as vLLM's StatelessProcessGroup and
// PyNcclCommunicator pass it on: 128 bytes. Errors: those of TcpStore and UnpickleNcclId.
absl::StatusOr<std::string> GroupIdInStore(const std::string& host, int port, const PeerWait& wait);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_TCP_STORE_H_
