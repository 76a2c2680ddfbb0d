// Cutting of weight blocks, and the order of their gathers. See sharded_weights.h.
#include "trainer_bridge/scorer/sharded_weights.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

constexpr size_t kAlignment = 256;

size_t ShardBytes(size_t block_bytes, int num_ranks) {
  const size_t unit = kAlignment * static_cast<size_t>(num_ranks);
  return (block_bytes + unit - 1) / unit * kAlignment;
}

}  // namespace

size_t GatheredBytes(const WeightLayout& layout, int num_ranks) {
  size_t largest = 0;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    const size_t shard = ShardBytes(layout.BlockBytes(block), num_ranks);
    largest = std::max(largest, shard * static_cast<size_t>(num_ranks));
  }
  return largest;
}

absl::StatusOr<RankShards> RankShards::Allocate(const WeightLayout& layout, int num_ranks,
                                                Device& device) {
  RankShards shards;
  shards.offsets_.push_back(0);
  for (int block = 0; block < layout.num_blocks(); ++block) {
    shards.offsets_.push_back(shards.offsets_.back() +
                              ShardBytes(layout.BlockBytes(block), num_ranks));
  }
  ISOBIT_ASSIGN_OR_RETURN(shards.memory_, device.Allocate(shards.total_bytes()));
  return shards;
}

absl::StatusOr<std::vector<PackTask>> ShardedStore::Plan() {
  for (const std::unique_ptr<Device>& device : devices_) {
    ISOBIT_ASSIGN_OR_RETURN(RankShards shards, RankShards::Allocate(layout_, num_ranks_, *device));
    ranks_.push_back(std::move(shards));
  }
  std::vector<PackTask> tasks;
  for (int block = 0; block < layout_.num_blocks(); ++block) {
    const size_t bytes =
        ShardBytes(layout_.BlockBytes(block), num_ranks_) * static_cast<size_t>(num_ranks_);
    tasks.push_back({.layout = &layout_, .block = block, .bytes = bytes});
  }
  return tasks;
}

absl::Status ShardedStore::Put(const PackTask& task, const std::byte* packed) {
  const size_t shard_bytes = task.bytes / static_cast<size_t>(num_ranks_);
  const std::byte* shard = packed + static_cast<size_t>(first_rank_) * shard_bytes;
  const std::lock_guard lock(copying_);
  for (size_t r = 0; r < ranks_.size(); ++r, shard += shard_bytes) {
    ISOBIT_RETURN_IF_ERROR(devices_[r]->Copy(ranks_[r].shard(task.block), shard, shard_bytes));
  }
  for (const auto& device : devices_) ISOBIT_RETURN_IF_ERROR(device->Synchronize());
  return absl::OkStatus();
}

// One device packs whole blocks, of which Put gives the others their shards.
absl::StatusOr<std::unique_ptr<DevicePacker>> ShardedStore::MakePacker(size_t /*rank*/) {
  return devices_.front()->MakePacker();
}

absl::StatusOr<const std::byte*> GatheredPass::Acquire(int block) {
  ISOBIT_CHECK(block == acquired_ + 1 || (block == acquired_ && block == last_block()))
      << "block " << block << " after block " << acquired_;
  acquired_ = block;
  if (full_.gather_ == nullptr) return shards_.shard(block);
  if (status_.ok()) status_ = StartNext();
  ISOBIT_RETURN_IF_ERROR(status_);
  ISOBIT_CHECK(block < num_started_)
      << "block " << block << " acquired with " << BlockGather::kBuffers << " others held";
  absl::StatusOr<const std::byte*> bytes = full_.gather_->Use(block % BlockGather::kBuffers);
  status_ = bytes.status();
  return bytes;
}

void GatheredPass::Release(int block) {
  if (full_.gather_ == nullptr || !status_.ok()) return;
  if (block == last_block()) return;  // no block waits for its buffer, and it may be acquired again
  ISOBIT_CHECK(block == num_released_)
      << "block " << block << " released before block " << num_released_;
  status_ = ReleaseOldest();
  if (status_.ok()) status_ = StartNext();
}

absl::Status GatheredPass::WaitForStarted() {
  return full_.gather_ == nullptr ? absl::OkStatus() : full_.gather_->WaitForArrival();
}

absl::Status GatheredPass::WaitForArrival() {
  ISOBIT_CHECK(acquired_ == last_block()) << "acquired block " << acquired_;
  return WaitForStarted();
}

absl::Status GatheredPass::Finish() {
  if (finished_ || full_.gather_ == nullptr) return absl::OkStatus();
  finished_ = true;
  while (status_.ok() && num_released_ < shards_.num_blocks()) {
    status_ = StartNext();
    if (status_.ok()) status_ = ReleaseOldest();
  }
  if (status_.ok()) status_ = full_.gather_->Finish();
  full_.resident_.store(0);
  return status_;
}

absl::Status GatheredPass::StartNext() {
  const int end = std::min(shards_.num_blocks(), num_released_ + BlockGather::kBuffers);
  for (; num_started_ < end; ++num_started_) {
    full_.peak_.store(std::max(full_.peak_.load(), full_.resident_.fetch_add(1) + 1));
    ISOBIT_RETURN_IF_ERROR(full_.gather_->Start(num_started_ % BlockGather::kBuffers,
                                                shards_.shard(num_started_),
                                                shards_.shard_bytes(num_started_)));
  }
  return absl::OkStatus();
}

absl::Status GatheredPass::ReleaseOldest() {
  full_.resident_.fetch_sub(1);
  return full_.gather_->Release(num_released_++ % BlockGather::kBuffers);
}

}  // namespace isobit
