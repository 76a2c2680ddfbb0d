// How the ranks of a group exchange bytes. No arithmetic here: sums belong to kernels/, which
// defines their order.
#ifndef ISOBIT_COMMON_PARALLEL_COMMUNICATOR_H_
#define ISOBIT_COMMON_PARALLEL_COMMUNICATOR_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace isobit {

// One rank's end of a group. Every rank must make the same calls in the same order, and use its end
// from one thread. After Abort, or when a peer fails, every call returns that error instead of
// waiting.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Each rank sends `bytes` bytes; the result points to the bytes of every rank, by rank. The
  // caller must not change `send` until its next Gather or Barrier has returned, so it alternates
  // between two buffers. The result is valid as long.
  virtual absl::StatusOr<absl::Span<const void* const>> Gather(const void* send, size_t bytes) = 0;

  // Returns when every rank has called it.
  virtual absl::Status Barrier() = 0;

  // Ends the group: all waiting and later calls of all ranks return `reason`, which must be an
  // error.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_COMMUNICATOR_H_
