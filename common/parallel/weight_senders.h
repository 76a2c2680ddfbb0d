// One rank's connection to the processes that send it weights, such as a trainer's: bytes between
// GPUs, in groups that both sides join. Not here: what is sent (kernels/model/sent_weights.h).
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

// A group of the senders, which have the ranks 0 to num_senders - 1, and of this rank, the last.
struct SenderGroup {
  std::string id;  // NCCL's, of 128 bytes
  int num_senders = 1;
  bool has_joined = false;   // before, in an earlier update
  int64_t nccl_version = 0;  // the senders', as ncclGetVersion gives it
  // How long this rank waits for a sender that sends nothing.
  std::chrono::milliseconds max_silence{60'000};
  // Called now and then until Leave; an error ends the group. Any thread.
  std::function<absl::Status()> check;
};

// Bytes that pass between this rank's device memory and a sender's.
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

  // Joins a group, or goes on in the one that it is in. INVALID_ARGUMENT: not an id; a sender on
  // this rank's GPU. FAILED_PRECONDITION: another version of NCCL; not in that group, though
  // has_joined. DEADLINE_EXCEEDED: not all senders came. UNAVAILABLE: a sender or the network
  // failed.
  virtual absl::Status Join(const SenderGroup& group) = 0;

  // Enqueues the transfers, which then run at the same time, on the rank's stream for weights.
  virtual absl::Status Exchange(absl::Span<const SenderTransfer> transfers) = 0;

  // To be called once after each Join that succeeded. so_far: OK if all that was enqueued has
  // ended; after an error the group is given up. Returns `so_far`, or why the group ended
  // meanwhile: what was transferred is then worthless.
  virtual absl::Status Leave(const absl::Status& so_far) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_WEIGHT_SENDERS_H_
