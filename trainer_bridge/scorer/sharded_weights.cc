// Cutting, gathering and prefetching of weight blocks. See sharded_weights.h.
#include "trainer_bridge/scorer/sharded_weights.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/base/check.h"
#include "common/base/status_macros.h"

namespace isobit::scorer {
namespace {

constexpr size_t kAlignment = 64;

size_t ShardBytes(size_t block_bytes, int num_ranks) {
  const size_t unit = kAlignment * static_cast<size_t>(num_ranks);
  return (block_bytes + unit - 1) / unit * kAlignment;
}

size_t LargestBlockBytes(const WeightLayout& layout, int num_ranks) {
  size_t largest = 0;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    const size_t shard = ShardBytes(layout.BlockBytes(block), num_ranks);
    largest = std::max(largest, shard * static_cast<size_t>(num_ranks));
  }
  return largest;
}

}  // namespace

RankShards::RankShards(const WeightLayout& layout, int num_ranks) {
  for (int block = 0; block < layout.num_blocks(); ++block) {
    sizes_.push_back(ShardBytes(layout.BlockBytes(block), num_ranks));
    shards_.push_back(AllocateAligned(sizes_.back()));
  }
}

size_t RankShards::total_bytes() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), size_t{0});
}

std::vector<RankShards> CutIntoShards(const WeightLayout& layout, const Checkpoint& checkpoint,
                                      const Ops& ops, int num_ranks) {
  std::vector<RankShards> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.emplace_back(layout, num_ranks);
  const size_t largest = LargestBlockBytes(layout, num_ranks);
  const AlignedBytes full = AllocateAligned(largest);
  for (int block = 0; block < layout.num_blocks(); ++block) {
    std::memset(full.get(), 0, largest);
    layout.PackBlock(checkpoint, ops, block, full.get());
    const std::byte* next = full.get();
    for (RankShards& rank : ranks) {
      std::memcpy(rank.shard(block), next, rank.shard_bytes(block));
      next += rank.shard_bytes(block);
    }
  }
  return ranks;
}

FullBlocks::FullBlocks(const WeightLayout& layout, int num_ranks) {
  for (AlignedBytes& buffer : buffers_) {
    buffer = AllocateAligned(LargestBlockBytes(layout, num_ranks));
  }
}

std::byte* FullBlocks::Fill(int block) {
  const int now = resident_.fetch_add(1) + 1;
  ISOBIT_CHECK(now <= kCapacity) << now << " full blocks";
  peak_.store(std::max(peak_.load(), now));
  return buffers_[block % kCapacity].get();
}

void FullBlocks::Drop() { resident_.fetch_sub(1); }

GatheredPass::GatheredPass(const RankShards& shards, Communicator& comm, FullBlocks& full)
    : shards_(shards), comm_(comm), full_(full), gatherer_([this] { GatherAll(); }) {}

GatheredPass::~GatheredPass() {
  for (int block = acquired_ + 1; block < shards_.num_blocks(); ++block) {
    if (!Acquire(block).ok()) break;
  }
  gatherer_.join();
  while (full_.resident() > 0) full_.Drop();
}

absl::StatusOr<const std::byte*> GatheredPass::Acquire(int block) {
  std::unique_lock lock(mutex_);
  ISOBIT_CHECK(block == acquired_ || block == acquired_ + 1)
      << "block " << block << " after block " << acquired_;
  if (block == acquired_ + 1 && acquired_ >= 0) full_.Drop();
  acquired_ = block;
  changed_.notify_all();
  changed_.wait(lock, [&] { return gathered_ > block || !failure_.ok(); });
  if (gathered_ > block) return places_[static_cast<size_t>(block)];
  return failure_;
}

void GatheredPass::GatherAll() {
  absl::Status status;
  for (int block = 0; block < shards_.num_blocks() && status.ok(); ++block) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return block <= acquired_ + 1; });
    }
    status = GatherBlock(block);
  }
  // A peer may still be reading this rank's last shard.
  if (status.ok()) status = comm_.Barrier();
  const std::lock_guard lock(mutex_);
  failure_ = status;
  changed_.notify_all();
}

absl::Status GatheredPass::GatherBlock(int block) {
  const size_t bytes = shards_.shard_bytes(block);
  std::byte* const place = full_.Fill(block);
  ISOBIT_ASSIGN_OR_RETURN(const absl::Span<const void* const> sent,
                          comm_.Gather(shards_.shard(block), bytes));
  std::byte* next = place;
  for (const void* shard : sent) {
    std::memcpy(next, shard, bytes);
    next += bytes;
  }
  const std::lock_guard lock(mutex_);
  places_.push_back(place);
  gathered_ = block + 1;
  changed_.notify_all();
  return absl::OkStatus();
}

}  // namespace isobit::scorer
