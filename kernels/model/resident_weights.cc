// See resident_weights.h.
#include "kernels/model/resident_weights.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

constexpr size_t kBlockAlignment = 256;  // as Device::Allocate has

Memory HostMemory(size_t bytes) {
  return Memory(AllocateAligned(bytes).release(), [](std::byte* p) { AlignedFree()(p); });
}

}  // namespace

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
  std::vector<PackTask> tasks;
  size_t on_host = 0;  // bytes that wait there
  prepared_.resize(ranks_.size());
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r] == nullptr) continue;
    ResidentWeights& rank = *ranks_[r];
    ISOBIT_RETURN_IF_ERROR(rank.memory_->Restore());
    prepared_[r].resize(rank.blocks_.size());
    for (int block = 0; block < rank.layout_.num_blocks(); ++block) {
      if (!rank.owns(block)) continue;
      const size_t bytes = rank.layout_.BlockBytes(block);
      bool is_host = rank.device_.is_host();
      if (rank.loaded_) {
        absl::StatusOr<Memory> beside = rank.device_.AllocateBeside(bytes);
        if (absl::IsResourceExhausted(beside.status())) {
          is_host = true;
          beside = HostMemory(bytes);
          on_host += bytes;
        }
        ISOBIT_ASSIGN_OR_RETURN(prepared_[r][static_cast<size_t>(block)], std::move(beside));
      }
      tasks.push_back({.layout = &rank.layout_, .block = block, .bytes = bytes, .rank = r});
      if (is_host) tasks.back().place = PlaceOf(tasks.back());
    }
  }
  if (on_host > 0) {
    ISOBIT_LOG(Info) << absl::StrFormat(
        "weights: %.2f GB wait for the switch in host memory: no room beside the old ones",
        1e-9 * on_host);
  }
  return tasks;
}

std::byte* ResidentStore::PlaceOf(const PackTask& task) const {
  const auto block = static_cast<size_t>(task.block);
  std::byte* const prepared = prepared_[task.rank][block].get();
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
