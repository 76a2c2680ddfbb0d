// Puts blocks of bytes together from the shards of all ranks, ahead of the ops that read them. Not
// here: what a block is, or which one comes next.
#ifndef ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_
#define ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_

#include <chrono>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit {

// One rank's end. There is room for kBuffers blocks. All ranks start the same gathers in the same
// order; each rank uses its end from one thread, but for Abort. An error is final.
class BlockGather {
 public:
  static constexpr int kBuffers = 2;

  virtual ~BlockGather() = default;

  // Begins to gather a block into `buffer`, which is released: rank r's `bytes` bytes at `shard`
  // come to lie at r * bytes. Does not wait. `shard` stays as it is until Finish.
  virtual absl::Status Start(int buffer, const std::byte* shard, size_t bytes) = 0;

  // The block started last in `buffer`, for ops launched from now on.
  virtual absl::StatusOr<const std::byte*> Use(int buffer) = 0;

  // No op launched from now on reads `buffer`.
  virtual absl::Status Release(int buffer) = 0;

  // Waits until all blocks that were started have arrived here: what is computed from them cannot
  // wait for another rank any more. DEADLINE_EXCEEDED, UNAVAILABLE: a rank failed to send.
  virtual absl::Status WaitForArrival() = 0;

  // The same, and no rank reads this one's shards any more.
  virtual absl::Status Finish() = 0;

  // How long the gathers between the last two calls of Finish took, without pauses.
  virtual std::chrono::microseconds busy() const = 0;

  // Ends the group: waiting and later calls fail with `reason`, an error. Any thread.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_BLOCK_GATHER_H_
