// One rank's connection to processes that send it weights, such as a trainer's: bytes between GPUs,
// in groups that both sides join. Not here: what is sent (kernels/model/sent_weights.h).
#ifndef ISOBIT_COMMON_PARALLEL_WEIGHT_SENDERS_H_
#define ISOBIT_COMMON_PARALLEL_WEIGHT_SENDERS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace isobit {

// A group of the senders, with ranks 0 to num_senders - 1, and of this rank, which is the last.
struct SenderGroup {
  std::string id;  // NCCL's, of 128 bytes
  int num_senders = 1;
  bool has_joined = false;   // already, in an earlier update
  int64_t nccl_version = 0;  // the senders', as ncclGetVersion returns it
  // How long this rank waits while a sender sends nothing.
  std::chrono::milliseconds max_silence{60'000};
  // Called from time to time until Leave; an error ends the group. Called on any thread.
  std::function<absl::Status()> check;
};

// Bytes to copy between this rank's device memory and a sender's.
struct SenderTransfer {
  int sender = 0;
  bool to_sender = false;
  std::byte* memory = nullptr;
  size_t bytes = 0;
};

// Used by one thread at a time.
class WeightSenders {
 public:
  virtual ~WeightSenders() = default;

  // Joins a group, or stays in its current one. INVALID_ARGUMENT: the id is malformed, or a sender
  // is on this rank's GPU. FAILED_PRECONDITION: the senders have another version of NCCL, or
  // has_joined is set but this rank is not in the group. DEADLINE_EXCEEDED: not all senders came.
  // UNAVAILABLE: a sender or the network failed.
  virtual absl::Status Join(const SenderGroup& group) = 0;

  // Enqueues the transfers, which run at the same time, on this rank's stream for weights.
  virtual absl::Status Exchange(absl::Span<const SenderTransfer> transfers) = 0;

  // Call it once after each successful Join. so_far: OK if everything that was enqueued has ended;
  // after an error the group is left. Returns `so_far`, or why the group ended meanwhile: what was
  // transferred is then worthless.
  virtual absl::Status Leave(const absl::Status& so_far) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_WEIGHT_SENDERS_H_
