// A client of PyTorch's TCPStore, at which trainers meet: rank 0 of a group serves it and puts the
// group's id there. Speaks the protocol of PyTorch 2.1 and later. Only what a joining rank needs is
// here; the meaning of values is not.
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

// Used by one thread. Errors: those of TcpConnection; INVALID_ARGUMENT: the answer is not one that
// a TCPStore gives, or is too long.
class TcpStore {
 public:
  // wait: for all calls together.
  static absl::StatusOr<TcpStore> Connect(const std::string& host, int port, const PeerWait& wait);

  // Tells the server that this worker has arrived; the server waits for all workers.
  absl::Status CheckIn();

  // Waits until the key is set, and returns its value, of at most `max_bytes`.
  absl::StatusOr<std::string> Get(absl::string_view key, size_t max_bytes);

 private:
  TcpStore(TcpConnection connection, const PeerWait& wait)
      : connection_(std::move(connection)), wait_(wait) {}

  TcpConnection connection_;
  PeerWait wait_;
};

// Reads the group's id, 128 bytes, from a trainer's store, where vLLM's StatelessProcessGroup and
// PyNcclCommunicator put it. Errors: those of TcpStore and UnpickleNcclId.
absl::StatusOr<std::string> GroupIdInStore(const std::string& host, int port, const PeerWait& wait);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_TCP_STORE_H_
