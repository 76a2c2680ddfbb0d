// Weights as FSDP keeps them: each block cut into N equal shards, one a rank, and a full block put
// together only while a forward pass needs it.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SHARDED_WEIGHTS_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SHARDED_WEIGHTS_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/parallel/communicator.h"
#include "kernels/model/weights.h"
#include "kernels/ops.h"

namespace isobit::scorer {

// What one rank keeps of every block: the bytes [rank, rank + 1) * shard_bytes(block), the last
// ones padded with zeros. Immutable once made.
class RankShards {
 public:
  RankShards(const WeightLayout& layout, int num_ranks);

  int num_blocks() const { return static_cast<int>(shards_.size()); }
  // Equal on all ranks; a multiple of 64.
  size_t shard_bytes(int block) const { return sizes_[static_cast<size_t>(block)]; }
  std::byte* shard(int block) { return shards_[static_cast<size_t>(block)].get(); }
  const std::byte* shard(int block) const { return shards_[static_cast<size_t>(block)].get(); }
  // Of all blocks together.
  size_t total_bytes() const;

 private:
  std::vector<size_t> sizes_;
  std::vector<AlignedBytes> shards_;
};

// Packs each block of a checkpoint that ValidateCheckpoint has accepted and cuts it into the shards
// of `num_ranks` ranks. Needs one full block beside the result.
std::vector<RankShards> CutIntoShards(const WeightLayout& layout, const Checkpoint& checkpoint,
                                      const Ops& ops, int num_ranks);

// One rank's room for full blocks: two, each as large as the largest block. Outlives the passes
// that use it, so that they need not allocate.
class FullBlocks {
 public:
  static constexpr int kCapacity = 2;

  FullBlocks(const WeightLayout& layout, int num_ranks);

  // Blocks that are gathered, or being gathered, right now; and the most that ever were.
  // INVARIANT: never above kCapacity (ShardedWeightsTest.AtMostTwoFullBlocksAreResident).
  int resident() const { return resident_.load(); }
  int peak() const { return peak_.load(); }

 private:
  friend class GatheredPass;
  std::byte* Fill(int block);  // counts one more, and gives the place for it
  void Drop();                 // counts one less

  AlignedBytes buffers_[kCapacity];
  std::atomic<int> resident_{0};
  std::atomic<int> peak_{0};
};

// One rank's weights during one forward pass. A thread of its own gathers the blocks in order, the
// next one while the present one is used; a block's room is free again once the block after it is
// acquired. All ranks make their passes in the same order and each takes part in every gather, also
// a rank with nothing to compute: it just destroys its pass.
class GatheredPass final : public WeightSource {
 public:
  // All arguments outlive the object. No other pass uses `comm` or `full` meanwhile. The shards of
  // all ranks of `comm` are of one version.
  GatheredPass(const RankShards& shards, Communicator& comm, FullBlocks& full);
  GatheredPass(const GatheredPass&) = delete;
  GatheredPass& operator=(const GatheredPass&) = delete;
  // Takes part in the gathers that are left, and waits for all ranks to have done so.
  ~GatheredPass() override;

  // `block` is the last acquired one or the one after it. Fails when the group is aborted.
  absl::StatusOr<const std::byte*> Acquire(int block) override;
  void Release(int /*block*/) override {}

 private:
  void GatherAll();
  absl::Status GatherBlock(int block);

  const RankShards& shards_;
  Communicator& comm_;
  FullBlocks& full_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  int acquired_ = -1;  // the last block asked for
  int gathered_ = 0;   // blocks below it have arrived
  absl::Status failure_;
  std::vector<const std::byte*> places_;  // of the gathered blocks

  std::thread gatherer_;
};

}  // namespace isobit::scorer

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SHARDED_WEIGHTS_H_
