// A rank's weights, complete in its backend's memory, and their replacement by an update.
#ifndef ISOBIT_KERNELS_MODEL_RESIDENT_WEIGHTS_H_
#define ISOBIT_KERNELS_MODEL_RESIDENT_WEIGHTS_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/model/weight_store.h"
#include "kernels/model/weights.h"

namespace isobit {

// One rank's prepared weight blocks, which do not serve yet. A block is in the backend's memory, or
// in host memory if there was no room for it; null: Commit has nothing to copy.
using PreparedBlocks = std::vector<Memory>;

// The prepared blocks of all ranks, [rank]. Their devices free the memory at the same time: a GPU
// needs about 25 ms for 16 GB.
struct PreparedRanks {
  explicit PreparedRanks(size_t num_ranks = 0) : blocks(num_ranks) {}
  PreparedRanks(PreparedRanks&&) = default;
  ~PreparedRanks();

  std::vector<PreparedBlocks> blocks;
};

// INVARIANT: a block keeps its address for life, so that captured graphs remain valid
// (ResidentWeightsTest.UpdatesInPlace).
class ResidentWeights final : public WeightSource {
 public:
  // Allocates all blocks, uninitialised. `layout` and `device` outlive the object. embedding:
  // another rank's, in the same memory, to be shared; or null. copies: the layout
  // (WeightLayout::WithCopies) that gives the blocks' size; the caller fills what follows `layout`
  // after each Commit; or null. RESOURCE_EXHAUSTED: the backend has too little memory.
  static absl::StatusOr<std::unique_ptr<ResidentWeights>> Create(
      const WeightLayout& layout, Device& device, std::shared_ptr<std::byte[]> embedding = nullptr,
      const WeightLayout* copies = nullptr);

  absl::StatusOr<const std::byte*> Acquire(int block) override {
    return blocks_[static_cast<size_t>(block)].get();
  }
  void Release(int /*block*/) override {}

  // Copies prepared blocks over those that serve, and waits. Call it on the thread of the device's
  // ops, after all ops that read the old blocks. An error is final: some blocks may be new.
  absl::Status Commit(const PreparedBlocks& prepared);

  // Frees the memory, and the weights with it. Call it on the thread of the device's ops, while no
  // ResidentStore exists. The next store allocates memory at the same addresses and, as at first,
  // fills it in place; until its Commit the rank has no weights. A shared embedding is gone once
  // its owner has released it.
  absl::Status ReleaseMemory();
  bool loaded() const { return loaded_; }

  std::shared_ptr<std::byte[]> embedding() const { return blocks_.front(); }
  // Currently allocated bytes of the backend's memory, without a shared embedding.
  size_t bytes() const { return memory_->bytes(); }

 private:
  friend class ResidentStore;
  ResidentWeights(const WeightLayout& layout, Device& device) : layout_(layout), device_(device) {}
  bool owns(int block) const { return block > 0 || owns_embedding_; }

  const WeightLayout& layout_;
  Device& device_;
  std::shared_ptr<ReleasableMemory> memory_;          // with all blocks that it owns
  std::vector<std::shared_ptr<std::byte[]>> blocks_;  // in `memory_`, except a shared embedding
  bool owns_embedding_ = true;
  bool loaded_ = false;  // Commit was called, and ReleaseMemory not since then
};

// Memory for a new version on all ranks of a model; the version is packed while the old one may
// serve. The first weights of a rank are packed directly into their final place. Only one store at
// a time, and none during a Commit.
class ResidentStore final : public WeightStore {
 public:
  // [rank]; null for a rank without weights. They outlive the object.
  explicit ResidentStore(std::vector<ResidentWeights*> ranks)
      : ranks_(std::move(ranks)), prepared_(ranks_.size()) {}

  absl::StatusOr<std::vector<PackTask>> Plan() override;
  absl::Status Put(const PackTask& task, const std::byte* packed) override;
  absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker(size_t rank) override;
  std::byte* DevicePlaceOf(const PackTask& task) const override;

  // The blocks that PackModel has filled, for Commit on each rank.
  PreparedRanks Take() { return std::move(prepared_); }

 private:
  struct RankPlan {
    std::vector<PackTask> tasks;
    size_t on_host = 0;  // bytes that wait in host memory
  };

  absl::Status PlanRank(size_t rank, RankPlan& plan);
  std::byte* PlaceOf(const PackTask& task) const;

  std::vector<ResidentWeights*> ranks_;
  PreparedRanks prepared_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_RESIDENT_WEIGHTS_H_
