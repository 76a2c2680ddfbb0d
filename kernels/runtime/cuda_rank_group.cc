// Free memory, peer memory, NCCL groups, and the all-reduce that fits them.
#include "kernels/runtime/cuda_rank_group.h"

#include <cuda_runtime_api.h>

#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/blocks/step_halves.h"
#include "kernels/cuda/common/collective/nccl_all_reduce.h"
#include "kernels/cuda/common/vanilla/nccl_bf16_sum.h"
#include "kernels/cuda/sm90/collective/hop_all_reduce.h"
#include "kernels/cuda/sm90/log_probs/log_probs.h"
#include "kernels/ops/rms_norm.h"

namespace isobit {
namespace {

class PeerSum final : public AllReduce {
 public:
  // overlapped: for steps of overlap_rows or more; may be null.
  PeerSum(cuda::PeerAllReduce& sum, const cuda::Stream& stream,
          std::unique_ptr<OverlappedSum> overlapped, int64_t overlap_rows)
      : sum_(sum),
        stream_(stream),
        overlapped_(std::move(overlapped)),
        overlap_rows_(overlap_rows) {}
  const PartialPush* Push(int64_t rows) override {
    const PartialPush* const push = sum_.Push(rows);
    pushed_ = push != nullptr;
    return push;
  }
  absl::Status Norm(const void* partial, const RmsNormArgs& norm) override {
    const bool pushed = std::exchange(pushed_, false);
    return sum_.Norm(pushed ? nullptr : static_cast<const float*>(partial), norm, stream_);
  }
  OverlappedSum* Overlapped(int64_t rows) override {
    return rows >= overlap_rows_ ? overlapped_.get() : nullptr;
  }

 private:
  cuda::PeerAllReduce& sum_;
  const cuda::Stream& stream_;
  const std::unique_ptr<OverlappedSum> overlapped_;
  const int64_t overlap_rows_;
  bool pushed_ = false;  // the next Norm's partial
};

absl::StatusOr<std::vector<size_t>> FreeBytes(const std::vector<int>& devices) {
  std::vector<size_t> free(devices.size());
  for (size_t r = 0; r < devices.size(); ++r) {
    size_t total = 0;
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(devices[r]));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free[r], &total));
  }
  return free;
}

}  // namespace

absl::StatusOr<std::shared_ptr<CudaRankGroup>> CudaRankGroup::Create(const CudaRankOptions& options,
                                                                     const RankOptions& rank) {
  const int size = rank.shape.size;
  if (options.devices.size() != static_cast<size_t>(size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected ", size, " devices, one a rank, got ", options.devices.size()));
  }
  if (std::set<int>(options.devices.begin(), options.devices.end()).size() !=
      options.devices.size()) {
    return absl::InvalidArgumentError("two ranks on one device would wait for each other");
  }
  if (options.variant && rank.mode != NumericsMode::kTree) {
    return absl::InvalidArgumentError(absl::StrCat("a variant pass beside numerics ",
                                                   NumericsModeName(rank.mode),
                                                   ": it stands beside numerics tree alone"));
  }
  if (rank.plan.config.vocab_size > cuda::kMaxDeviceVocab) {
    return absl::InvalidArgumentError(absl::StrCat("a vocabulary of ", rank.plan.config.vocab_size,
                                                   " tokens; at most ", cuda::kMaxDeviceVocab,
                                                   " are supported on a GPU"));
  }
  auto group = std::make_shared<CudaRankGroup>();
  group->overlap_rows = options.overlap_rows;
  ISOBIT_ASSIGN_OR_RETURN(group->draw_shape, DrawShape::Of(rank));
  ISOBIT_ASSIGN_OR_RETURN(group->free_bytes, FreeBytes(options.devices));
  if (size > 1 &&
      (rank.mode == NumericsMode::kVanilla || options.variant || !options.peer_memory)) {
    ISOBIT_RETURN_IF_ERROR(group->ConnectNccl(options));
  }
  if (size == 1 || options.peer_memory) {
    ISOBIT_RETURN_IF_ERROR(group->MapMemory(options, rank));
  }
  return group;
}

absl::Status CudaRankGroup::MapMemory(const CudaRankOptions& options, const RankOptions& rank) {
  ISOBIT_ASSIGN_OR_RETURN(const PeerGroup group, PeerGroup::Create(options.devices));
  const ExchangeBytes bytes = draw_shape.exchange_bytes();
  for (size_t b = 0; b < bytes.size(); ++b) {
    ISOBIT_ASSIGN_OR_RETURN(exchanged[b], group.Allocate(bytes[b], 0));
  }
  if (group.size() == 1) return absl::OkStatus();
  const cuda::AllReduceKernels kernels = rank.mode == NumericsMode::kBatchInvariant
                                             ? cuda::HopAllReduceKernel
                                             : cuda::TreeAllReduceKernel;
  // In vanilla mode for its barrier alone.
  ISOBIT_ASSIGN_OR_RETURN(
      peers,
      cuda::PeerAllReduce::Create(
          group, {.hidden = rank.plan.config.hidden_size,
                  .kernels = kernels,
                  .push = {.rows = options.push_rows, .bytes_per_us = options.push_bytes_per_us},
                  .timeout = options.peer_timeout}));
  if (rank.mode == NumericsMode::kTree && rank.max_rows >= overlap_rows) {
    ISOBIT_ASSIGN_OR_RETURN(
        halves, group.Allocate(cuda::CopyEngineSum::SharedBytes(HalvesOf(rank), group.size()), 0));
    barrier = std::make_unique<ThreadBarrier>(group.size());
  }
  return absl::OkStatus();
}

cuda::CopyEngineSumOptions CudaRankGroup::HalvesOf(const RankOptions& rank) {
  return {.hidden = rank.plan.config.hidden_size, .max_rows = MostRowsOfHalf(rank.max_rows)};
}

// Every end waits for the others, so each is made on a thread of its own.
absl::Status CudaRankGroup::ConnectNccl(const CudaRankOptions& options) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string id, NewNcclId());
  const size_t size = options.devices.size();
  nccl.resize(size);
  std::vector<absl::Status> status(size);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      auto end = NcclGroup::Create({.id = id,
                                    .rank = static_cast<int>(r),
                                    .size = static_cast<int>(size),
                                    .device = options.devices[r]});
      status[r] = end.status();
      if (end.ok()) nccl[r] = *std::move(end);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& s : status) ISOBIT_RETURN_IF_ERROR(s);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<AllReduce>> CudaRankGroup::MakeAllReduce(const RankOptions& rank,
                                                                        CudaBackend& ops) const {
  const auto r = static_cast<size_t>(rank.shape.rank);
  std::unique_ptr<AllReduce> sum;
  const bool by_nccl = SumsByNccl(rank.mode);
  if (by_nccl && rank.mode == NumericsMode::kVanilla) {
    ISOBIT_ASSIGN_OR_RETURN(
        sum, cuda::NcclBf16Sum::Create(rank.plan.config.hidden_size, rank.max_rows, ops.device(),
                                       *nccl[r], ops.device().stream()));
  } else if (by_nccl) {
    ISOBIT_ASSIGN_OR_RETURN(
        sum, cuda::NcclAllReduce::Create(rank.plan.config.hidden_size, rank.max_rows, ops, *nccl[r],
                                         ops.device().stream()));
  } else if (!peers.empty()) {
    std::unique_ptr<OverlappedSum> overlapped;
    if (barrier != nullptr) {
      ISOBIT_ASSIGN_OR_RETURN(overlapped, cuda::CopyEngineSum::Create(
                                              HalvesOf(rank), rank.shape.rank, rank.shape.size,
                                              halves, *barrier, *peers[r], ops.device().stream()));
    }
    sum = std::make_unique<PeerSum>(*peers[r], ops.device().stream(), std::move(overlapped),
                                    overlap_rows);
  }
  return sum;
}

absl::StatusOr<std::unique_ptr<RankExchange>> CudaRankGroup::MakeExchange(
    int rank, CudaDevice& device) const {
  const auto r = static_cast<size_t>(rank);
  const int size = draw_shape.num_ranks;
  if (size > 1 && peers.empty()) {
    return MakeNcclExchange(draw_shape.exchange_bytes(), *nccl[r], size, device);
  }
  return MakePeerExchange(exchanged, rank, size, size > 1 ? peers[r].get() : nullptr,
                          device.stream());
}

size_t CudaRankGroup::bytes_of_rank() const {
  size_t bytes = halves.bytes() + (peers.empty() ? 0 : peers.front()->bytes());
  for (const PeerMemory& buffer : exchanged) bytes += buffer.bytes();
  return bytes;
}

void CudaRankGroup::Abort(const absl::Status& reason) const {
  for (const auto& end : nccl) end->Abort(reason);
  if (barrier != nullptr) barrier->Abort(reason);
}

}  // namespace isobit
