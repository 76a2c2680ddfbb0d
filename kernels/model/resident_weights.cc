// Places of blocks, prepared blocks, and the copy at the switch.
#include "kernels/model/resident_weights.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/check.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/parallel_for.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

constexpr size_t kBlockAlignment = 256;  // as Device::Allocate has

Memory HostMemory(size_t bytes) {
  return Memory(AllocateAligned(bytes).release(), [](std::byte* p) { AlignedFree()(p); });
}

}  // namespace

PreparedRanks::~PreparedRanks() {
  // The first weights of a rank have no memory of their own to give back.
  std::erase_if(blocks, [](const PreparedBlocks& of_rank) {
    return std::ranges::all_of(of_rank, [](const Memory& block) { return block == nullptr; });
  });
  const absl::Status freed = ParallelFor(blocks.size(), blocks.size(), [this](size_t rank, size_t) {
    blocks[rank].clear();
    return absl::OkStatus();
  });
  ISOBIT_CHECK(freed.ok());
}

absl::StatusOr<std::unique_ptr<ResidentWeights>> ResidentWeights::Create(
    const WeightLayout& layout, Device& device, std::shared_ptr<std::byte[]> embedding,
    const WeightLayout* copies) {
  std::unique_ptr<ResidentWeights> weights(new ResidentWeights(layout, device));
  weights->owns_embedding_ = embedding == nullptr;
  weights->blocks_.push_back(std::move(embedding));
  weights->blocks_.resize(static_cast<size_t>(layout.num_blocks()));
  const WeightLayout& whole = copies != nullptr ? *copies : layout;
  const auto padded = [&](int block) { return RoundUp(whole.BlockBytes(block), kBlockAlignment); };
  size_t bytes = 0;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (weights->owns(block)) bytes += padded(block);
  }
  ISOBIT_ASSIGN_OR_RETURN(weights->memory_, device.AllocateReleasable(bytes));
  std::byte* next = weights->memory_->get();
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (!weights->owns(block)) continue;
    weights->blocks_[static_cast<size_t>(block)] =
        std::shared_ptr<std::byte[]>(weights->memory_, next);
    next += padded(block);
  }
  return weights;
}

absl::Status ResidentWeights::ReleaseMemory() {
  ISOBIT_RETURN_IF_ERROR(device_.Synchronize());
  loaded_ = false;
  return memory_->Release();
}

absl::Status ResidentWeights::Commit(const PreparedBlocks& prepared) {
  loaded_ = true;
  for (size_t block = 0; block < prepared.size(); ++block) {
    if (prepared[block] == nullptr) continue;
    ISOBIT_RETURN_IF_ERROR(device_.Copy(blocks_[block].get(), prepared[block].get(),
                                        layout_.BlockBytes(static_cast<int>(block))));
    ISOBIT_RETURN_IF_ERROR(Failpoint("weights.commit"));
  }
  return device_.Synchronize();
}

absl::StatusOr<std::vector<PackTask>> ResidentStore::Plan() {
  std::vector<RankPlan> plans(ranks_.size());
  // A GPU takes some 30 ms to find memory for 16 GB.
  ISOBIT_RETURN_IF_ERROR(ParallelFor(ranks_.size(), ranks_.size(), [&](size_t rank, size_t) {
    return PlanRank(rank, plans[rank]);
  }));
  std::vector<PackTask> tasks;
  size_t on_host = 0;
  for (const RankPlan& plan : plans) {
    tasks.insert(tasks.end(), plan.tasks.begin(), plan.tasks.end());
    on_host += plan.on_host;
  }
  if (on_host > 0) {
    ISOBIT_LOG(Info) << absl::StrFormat(
        "weights: %.2f GB wait for the switch in host memory: no room beside the old ones",
        1e-9 * on_host);
  }
  return tasks;
}

absl::Status ResidentStore::PlanRank(size_t rank, RankPlan& plan) {
  if (ranks_[rank] == nullptr) return absl::OkStatus();
  ResidentWeights& weights = *ranks_[rank];
  ISOBIT_RETURN_IF_ERROR(weights.memory_->Restore());
  PreparedBlocks& prepared = prepared_.blocks[rank];
  prepared.resize(weights.blocks_.size());
  for (int block = 0; block < weights.layout_.num_blocks(); ++block) {
    if (!weights.owns(block)) continue;
    const size_t bytes = weights.layout_.BlockBytes(block);
    bool is_host = weights.device_.is_host();
    if (weights.loaded_) {
      absl::StatusOr<Memory> beside = weights.device_.AllocateBeside(bytes);
      if (absl::IsResourceExhausted(beside.status())) {
        is_host = true;
        beside = HostMemory(bytes);
        plan.on_host += bytes;
      }
      ISOBIT_ASSIGN_OR_RETURN(prepared[static_cast<size_t>(block)], std::move(beside));
    }
    plan.tasks.push_back(
        {.layout = &weights.layout_, .block = block, .bytes = bytes, .rank = rank});
    if (is_host) plan.tasks.back().place = PlaceOf(plan.tasks.back());
  }
  return absl::OkStatus();
}

std::byte* ResidentStore::PlaceOf(const PackTask& task) const {
  const auto block = static_cast<size_t>(task.block);
  std::byte* const prepared = prepared_.blocks[task.rank][block].get();
  return prepared != nullptr ? prepared : ranks_[task.rank]->blocks_[block].get();
}

absl::StatusOr<std::unique_ptr<DevicePacker>> ResidentStore::MakePacker(size_t rank) {
  if (ranks_[rank] == nullptr) return WeightStore::MakePacker(rank);
  return ranks_[rank]->device_.MakePacker();
}

std::byte* ResidentStore::DevicePlaceOf(const PackTask& task) const {
  return task.place == nullptr ? PlaceOf(task) : nullptr;
}

absl::Status ResidentStore::Put(const PackTask& task, const std::byte* packed) {
  return ranks_[task.rank]->device_.Upload(PlaceOf(task), packed, task.bytes);
}

}  // namespace isobit
