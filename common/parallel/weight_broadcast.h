// The receiving end of a group in which rank 0, a trainer, broadcasts weights to all others. Which
// bytes are which tensor is decided elsewhere (rollout/service/weight_transfer.h).
#ifndef ISOBIT_COMMON_PARALLEL_WEIGHT_BROADCAST_H_
#define ISOBIT_COMMON_PARALLEL_WEIGHT_BROADCAST_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/parallel/tcp_connection.h"

namespace isobit {

struct BroadcastGroup {
  std::string id;  // 128 bytes made by rank 0
  int rank = 1;    // this rank, at least 1
  int size = 2;    // ranks in all
};

// A rank's membership in a group; the destructor leaves the group. Used by one thread at a time.
// After an error nothing more may be received, since the ranks no longer agree on what comes next.
// Errors: those of PeerWait::check; DEADLINE_EXCEEDED: the sender was silent; UNAVAILABLE: it has
// gone.
class WeightBroadcast {
 public:
  virtual ~WeightBroadcast() = default;

  // Allocates room for broadcasts of at most `bytes` bytes; 0 frees it. RESOURCE_EXHAUSTED: there
  // is no memory.
  virtual absl::Status Reserve(size_t bytes) = 0;

  // Waits for the sender's next broadcast, which has `bytes` bytes, at most what is reserved, and
  // which Read then reads from its start. INVALID_ARGUMENT: it has another size, if that can be
  // known. max_silence: how long the sender may send nothing, here and in Read.
  virtual absl::Status Begin(size_t bytes, std::chrono::milliseconds max_silence,
                             const std::function<absl::Status()>& check) = 0;

  // Writes the next bytes of the broadcast to out[0, bytes), in host memory.
  virtual absl::Status Read(void* out, size_t bytes) = 0;
};

// Joins a group and waits for all ranks. INVALID_ARGUMENT: the id is malformed.
// FAILED_PRECONDITION: this service cannot join groups with such ids. UNAVAILABLE: another rank or
// the network failed. DEADLINE_EXCEEDED: not all ranks came. Also the errors of PeerWait::check.
using JoinWeightBroadcast = std::function<absl::StatusOr<std::unique_ptr<WeightBroadcast>>(
    const BroadcastGroup& group, const PeerWait& wait)>;

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_WEIGHT_BROADCAST_H_
