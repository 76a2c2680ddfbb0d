// Gathers blocks of bytes from the shards of all ranks (all-gather), ahead of the ops that read
// them. Not here: what a block is, or which one comes next.
#ifndef ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_
#define ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_

#include <chrono>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit {

// One rank's end. There are kBuffers gather buffers, each for one block. All ranks start the same
// gathers in the same order; each rank calls its end from one thread, except Abort. An error is
// final.
class BlockGather {
 public:
  static constexpr int kBuffers = 2;

  virtual ~BlockGather() = default;

  // Begins to gather a block into `buffer`, which must be released. The `bytes` bytes of rank r's
  // `shard` arrive at offset r * bytes. Does not wait. `shard` must not change until Finish.
  virtual absl::Status Start(int buffer, const std::byte* shard, size_t bytes) = 0;

  // Returns the block that was started last in `buffer`, for ops launched from now on.
  virtual absl::StatusOr<const std::byte*> Use(int buffer) = 0;

  // No op launched from now on reads `buffer`.
  virtual absl::Status Release(int buffer) = 0;

  // Waits until all blocks that were started have arrived here. Ops that read them then wait for no
  // other rank. DEADLINE_EXCEEDED, UNAVAILABLE: a rank failed to send.
  virtual absl::Status WaitForArrival() = 0;

  // Like WaitForArrival; on return, moreover, no rank reads this rank's shards any more.
  virtual absl::Status Finish() = 0;

  // How long the gathers between the last two calls of Finish took, without pauses.
  virtual std::chrono::microseconds busy() const = 0;

  // Ends the group: calls that wait, and later calls, fail with `reason`, an error. Any thread.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_
