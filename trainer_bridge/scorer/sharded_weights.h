// Weights as in FSDP: each block is cut into N equal shards, one for each rank, and is gathered
// into a full block only while a forward pass needs it.
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

// The size in bytes of the largest block when gathered from `num_ranks` equal shards.
size_t GatheredBytes(const WeightLayout& layout, int num_ranks);

// One rank's shards of all blocks, in its device's memory: the bytes [rank, rank + 1) *
// shard_bytes(block), with zeros as padding at the end. Immutable once filled.
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

// A new version, cut into shards for `num_ranks`
// ranks. Device d gets those of rank first_rank + d.
class ShardedStore final : public WeightStore {
 public:
  // All arguments outlive the object; nothing else uses the devices meanwhile.
  ShardedStore(const WeightLayout& layout, int num_ranks, int first_rank,
               absl::Span<const std::unique_ptr<Device>> devices)
      : layout_(layout), num_ranks_(num_ranks), first_rank_(first_rank), devices_(devices) {}

  absl::StatusOr<std::vector<PackTask>> Plan() override;
  absl::Status Put(const PackTask& task, const std::byte* packed) override;
  absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker(size_t rank) override;

  // The shards that PackModel has filled, [device].
  std::vector<RankShards> Take() { return std::move(ranks_); }

 private:
  const WeightLayout& layout_;
  const int num_ranks_;
  const int first_rank_;
  const absl::Span<const std::unique_ptr<Device>> devices_;
  std::vector<RankShards> ranks_;
  std::mutex copying_;  // a device serves one thread at a time
};

// One rank's full blocks: gathers and counts them. Outlives the passes, which use it one after the
// other.
class FullBlocks {
 public:
  // gather: null if there is only one rank, whose shards are the full blocks.
  explicit FullBlocks(std::unique_ptr<BlockGather> gather) : gather_(std::move(gather)) {}

  // Blocks that are gathered or being gathered right now, and the largest number there ever was.
  // Both are 0 if there is only one rank.
  // INVARIANT: never above BlockGather::kBuffers
  // (ShardedWeightsTest.AtMostTwoFullBlocksAreResident).
  int resident() const { return resident_.load(); }
  int peak() const { return peak_.load(); }

  // How long the last pass's gathers took in total, including time that computation overlapped.
  std::chrono::microseconds gather_time() const {
    return gather_ == nullptr ? std::chrono::microseconds(0) : gather_->busy();
  }

  // Ends the group of ranks. `reason` is an error. Any thread may call it.
  void Abort(const absl::Status& reason) {
    if (gather_ != nullptr) gather_->Abort(reason);
  }

 private:
  friend class GatheredPass;

  const std::unique_ptr<BlockGather> gather_;
  std::atomic<int> resident_{0};
  std::atomic<int> peak_{0};
};

// One rank's weights during one forward pass. Blocks are gathered in order, into the buffers of
// released blocks: while one block is held, the next one arrives. All ranks make their passes in
// the same order, and each takes part in every gather; a rank with nothing to compute just finishes
// its pass. Used from one thread.
class GatheredPass final : public WeightSource {
 public:
  // All arguments outlive the object. The shards of all ranks are of the same version.
  GatheredPass(const RankShards& shards, FullBlocks& full) : shards_(shards), full_(full) {}
  GatheredPass(const GatheredPass&) = delete;
  GatheredPass& operator=(const GatheredPass&) = delete;
  ~GatheredPass() override { static_cast<void>(Finish()); }

  // As WeightSource says, with at most BlockGather::kBuffers blocks held at the same time. Ops
  // launched from now until the release can read the bytes. Errors: those of BlockGather.
  // INVARIANT: a held block keeps its bytes (ShardedForwardTest.AHeldBlockKeepsItsBytes).
  absl::StatusOr<const std::byte*> Acquire(int block) override;
  void Release(int block) override;

  // Waits until no launched op depends on another rank any more. WaitForArrival: requires that all
  // blocks are acquired, so that no op launched later depends on one, either.
  absl::Status WaitForStarted();
  absl::Status WaitForArrival();

  // Takes part in the remaining gathers, and waits until no rank needs this one's shards any more.
  // Nothing may be acquired afterwards.
  absl::Status Finish();

 private:
  int last_block() const { return shards_.num_blocks() - 1; }
  // Starts gathers as long as there are free buffers.
  absl::Status StartNext();
  // Frees the buffer of the oldest block that is not yet released.
  absl::Status ReleaseOldest();

  const RankShards& shards_;
  FullBlocks& full_;
  int num_started_ = 0;   // blocks whose gather has been started
  int num_released_ = 0;  // of these, blocks whose buffer has been freed
  int acquired_ = -1;     // the last acquired block
  bool finished_ = false;
  absl::Status status_;  // the first error, or OK
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SHARDED_WEIGHTS_H_
