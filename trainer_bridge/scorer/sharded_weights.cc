// Cutting of weight blocks, and the order of their gathers. See sharded_weights.h.
#include "trainer_bridge/scorer/sharded_weights.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "kernels/model/pack_model.h"

namespace isobit::scorer {
namespace {

constexpr size_t kAlignment = 256;

// Groups of blocks that are packed at one time, each on a thread and in host memory of its own.
constexpr size_t kMaxPackers = 8;

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

absl::StatusOr<CutWeights> CutIntoShards(const WeightLayout& layout, const TensorSource& source,
                                         const std::string& expected_digest, int num_ranks,
                                         int first_rank,
                                         absl::Span<const std::unique_ptr<Device>> devices) {
  CutWeights cut;
  for (const std::unique_ptr<Device>& device : devices) {
    ISOBIT_ASSIGN_OR_RETURN(RankShards shards, RankShards::Allocate(layout, num_ranks, *device));
    cut.ranks.push_back(std::move(shards));
  }
  const size_t full_bytes = GatheredBytes(layout, num_ranks);
  AlignedBytes full_blocks[kMaxPackers];
  std::mutex copying;  // devices serve one thread at a time
  const auto cut_block = [&](int block, const TensorSet& tensors, std::byte* full) -> absl::Status {
    const size_t bytes = layout.BlockBytes(block);
    const size_t shard_bytes = ShardBytes(bytes, num_ranks);
    std::memset(full + bytes, 0, shard_bytes * static_cast<size_t>(num_ranks) - bytes);
    layout.PackBlock(tensors, block, full);
    const std::byte* shard = full + static_cast<size_t>(first_rank) * shard_bytes;
    const std::lock_guard lock(copying);
    for (size_t r = 0; r < cut.ranks.size(); ++r, shard += shard_bytes) {
      ISOBIT_RETURN_IF_ERROR(devices[r]->Copy(cut.ranks[r].shard(block), shard, shard_bytes));
    }
    for (const auto& device : devices) ISOBIT_RETURN_IF_ERROR(device->Synchronize());
    return absl::OkStatus();
  };
  ISOBIT_ASSIGN_OR_RETURN(
      cut.digest,
      PackModel(
          source, layout, {.expected_digest = expected_digest, .max_workers = kMaxPackers},
          [&](const BlockGroup&) { return full_bytes; },
          [&](const BlockGroup& group, const TensorSet& tensors, size_t packer) -> absl::Status {
            AlignedBytes& full = full_blocks[packer];
            if (full == nullptr) full = AllocateAligned(full_bytes);
            for (const int block : group.blocks) {
              ISOBIT_RETURN_IF_ERROR(cut_block(block, tensors, full.get()));
            }
            return absl::OkStatus();
          }));
  return cut;
}

absl::StatusOr<const std::byte*> GatheredPass::Acquire(int block) {
  ISOBIT_CHECK(block == acquired_ + 1 || (block == acquired_ && block == last_block()))
      << "block " << block << " after block " << acquired_;
  acquired_ = block;
  if (full_.gather_ == nullptr) return shards_.shard(block);
  if (status_.ok()) status_ = StartNext();
  ISOBIT_RETURN_IF_ERROR(status_);
  ISOBIT_CHECK(block < num_started_)
      << "block " << block << " acquired with " << BlockGather::kPlaces << " others held";
  absl::StatusOr<const std::byte*> bytes = full_.gather_->Use(block % BlockGather::kPlaces);
  status_ = bytes.status();
  return bytes;
}

void GatheredPass::Release(int block) {
  if (full_.gather_ == nullptr || !status_.ok()) return;
  if (block == last_block()) return;  // no block waits for its place, and it may be acquired again
  ISOBIT_CHECK(block == num_released_)
      << "block " << block << " released before block " << num_released_;
  status_ = ReleaseOldest();
  if (status_.ok()) status_ = StartNext();
}

absl::Status GatheredPass::WaitForArrival() {
  ISOBIT_CHECK(acquired_ == last_block()) << "acquired block " << acquired_;
  return full_.gather_ == nullptr ? absl::OkStatus() : full_.gather_->WaitForArrival();
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
  const int end = std::min(shards_.num_blocks(), num_released_ + BlockGather::kPlaces);
  for (; num_started_ < end; ++num_started_) {
    full_.peak_.store(std::max(full_.peak_.load(), full_.resident_.fetch_add(1) + 1));
    ISOBIT_RETURN_IF_ERROR(full_.gather_->Start(num_started_ % BlockGather::kPlaces,
                                                shards_.shard(num_started_),
                                                shards_.shard_bytes(num_started_)));
  }
  return absl::OkStatus();
}

absl::Status GatheredPass::ReleaseOldest() {
  full_.resident_.fetch_sub(1);
  return full_.gather_->Release(num_released_++ % BlockGather::kPlaces);
}

}  // namespace isobit::scorer
