// Gathers blocks of bytes from the shards of all ranks (all-gather), before the ops that read them.
// Not here: what a block is, or which one comes next.
#ifndef ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_
#define ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_

#include <chrono>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit {

// One rank's end. It has kBuffers gather buffers for one block each. All ranks start the same
// gathers in the same order. Each rank uses its end from one thread, except for Abort. Errors are
// final.
class BlockGather {
 public:
  static constexpr int kBuffers = 2;

  virtual ~BlockGather() = default;

  // Starts to gather a block into `buffer`, which must be released. The `bytes` bytes of rank r's
  // `shard` arrive at offset r * bytes. Does not wait. `shard` must not change until Finish.
  virtual absl::Status Start(int buffer, const std::byte* shard, size_t bytes) = 0;

  // Returns the block whose gather into `buffer` was started last, for ops launched from now on.
  virtual absl::StatusOr<const std::byte*> Use(int buffer) = 0;

  // The caller launches no further op that reads `buffer`.
  virtual absl::Status Release(int buffer) = 0;

  // Waits until all blocks whose gather was started have arrived here. Ops that read them then wait
  // for no other rank. DEADLINE_EXCEEDED, UNAVAILABLE: a rank failed to send.
  virtual absl::Status WaitForArrival() = 0;

  // Like WaitForArrival; also waits until no rank reads this rank's shards any more.
  virtual absl::Status Finish() = 0;

  // How long gathers took, without pauses, between the last two calls of Finish.
  virtual std::chrono::microseconds busy() const = 0;

  // Ends the group: waiting and later calls fail with `reason`, an error. Any thread may call it.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_
