// Weights as FSDP keeps them: each block is cut into N equal shards, one for each rank, and
// gathered into a full block only while a forward pass needs it.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SHARDED_WEIGHTS_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SHARDED_WEIGHTS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/parallel/block_gather.h"
#include "kernels/device.h"
#include "kernels/model/weight_store.h"
#include "kernels/model/weights.h"

namespace isobit {

// Bytes of the largest block when it is gathered from `num_ranks` equal shards.
size_t GatheredBytes(const WeightLayout& layout, int num_ranks);

// What one rank keeps of every block, in its device's memory: the bytes [rank, rank + 1) *
// shard_bytes(block), the last ones padded with zeros. Immutable once filled.
class RankShards {
 public:
  // RESOURCE_EXHAUSTED: they do not fit into the device's memory.
  static absl::StatusOr<RankShards> Allocate(const WeightLayout& layout, int num_ranks,
                                             Device& device);

  int num_blocks() const { return static_cast<int>(offsets_.size()) - 1; }
  // Equal on all ranks; a multiple of 256.
  size_t shard_bytes(int block) const {
    return offsets_[static_cast<size_t>(block) + 1] - offsets_[static_cast<size_t>(block)];
  }
  std::byte* shard(int block) { return memory_.get() + offsets_[static_cast<size_t>(block)]; }
  const std::byte* shard(int block) const {
    return memory_.get() + offsets_[static_cast<size_t>(block)];
  }
  // Of all blocks together.
  size_t total_bytes() const { return offsets_.back(); }

 private:
  RankShards() = default;

  std::vector<size_t> offsets_;  // [num_blocks + 1]
  Memory memory_;
};

// A new version, cut into the shards of `num_ranks` ranks. Device d gets those of rank
// first_rank + d.
class ShardedStore final : public WeightStore {
 public:
  // All arguments outlive the object; nothing else uses the devices meanwhile.
  ShardedStore(const WeightLayout& layout, int num_ranks, int first_rank,
               absl::Span<const std::unique_ptr<Device>> devices)
      : layout_(layout), num_ranks_(num_ranks), first_rank_(first_rank), devices_(devices) {}

  absl::StatusOr<std::vector<PackTask>> Plan() override;
  absl::Status Put(const PackTask& task, const std::byte* packed) override;
  absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker(size_t rank) override;

  // What PackModel has filled, [device].
  std::vector<RankShards> Take() { return std::move(ranks_); }

 private:
  const WeightLayout& layout_;
  const int num_ranks_;
  const int first_rank_;
  const absl::Span<const std::unique_ptr<Device>> devices_;
  std::vector<RankShards> ranks_;
  std::mutex copying_;  // devices serve one thread at a time
};

// One rank's full blocks: how they are gathered, and how many there are. Outlives the passes, which
// use it one after the other.
class FullBlocks {
 public:
  // gather: null if there is one rank, whose shards are the blocks.
  explicit FullBlocks(std::unique_ptr<BlockGather> gather) : gather_(std::move(gather)) {}

  // Blocks that are gathered, or being gathered, right now; and the most that ever were. None with
  // one rank.
  // INVARIANT: never above BlockGather::kBuffers
  // (ShardedWeightsTest.AtMostTwoFullBlocksAreResident).
  int resident() const { return resident_.load(); }
  int peak() const { return peak_.load(); }

  // How long the last pass's gathers took in all, whether or not they overlapped with computation.
  std::chrono::microseconds gather_time() const {
    return gather_ == nullptr ? std::chrono::microseconds(0) : gather_->busy();
  }

  // Ends the group of ranks. Any thread; `reason` is an error.
  void Abort(const absl::Status& reason) {
    if (gather_ != nullptr) gather_->Abort(reason);
  }

 private:
  friend class GatheredPass;

  const std::unique_ptr<BlockGather> gather_;
  std::atomic<int> resident_{0};
  std::atomic<int> peak_{0};
};

// One rank's weights during one forward pass. Blocks are gathered in order, into the buffers that
// released ones have left: while one block is held, the next one arrives. All ranks make their
// passes in the same order and each takes part in every gather, also a rank with nothing to
// compute: it just finishes its pass. Used from one thread.
class GatheredPass final : public WeightSource {
 public:
  // All arguments outlive the object. The shards of all ranks are of one version.
  GatheredPass(const RankShards& shards, FullBlocks& full) : shards_(shards), full_(full) {}
  GatheredPass(const GatheredPass&) = delete;
  GatheredPass& operator=(const GatheredPass&) = delete;
  ~GatheredPass() override { static_cast<void>(Finish()); }

  // As WeightSource says, with at most BlockGather::kBuffers blocks held at one time. The bytes are
  // there for ops launched from now on, until the release. Errors: as BlockGather's.
  // INVARIANT: a held block keeps its bytes (ShardedForwardTest.AHeldBlockKeepsItsBytes).
  absl::StatusOr<const std::byte*> Acquire(int block) override;
  void Release(int block) override;

  // Waits until no op that has been launched depends on another rank any more. WaitForArrival: all
  // blocks are acquired, so none that is launched later does.
  absl::Status WaitForStarted();
  absl::Status WaitForArrival();

  // Takes part in the gathers that are left, and waits until no rank needs this one's shards any
  // more. Nothing is acquired after it.
  absl::Status Finish();

 private:
  int last_block() const { return shards_.num_blocks() - 1; }
  // Gathers as many blocks as there are buffers for.
  absl::Status StartNext();
  // Frees the buffer of the oldest block that has not been released.
  absl::Status ReleaseOldest();

  const RankShards& shards_;
  FullBlocks& full_;
  int num_started_ = 0;   // blocks whose gather has begun
  int num_released_ = 0;  // of them, those whose buffer is free
  int acquired_ = -1;     // the last one
  bool finished_ = false;
  absl::Status status_;  // the first error
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SHARDED_WEIGHTS_H_
