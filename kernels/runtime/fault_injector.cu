// See fault_injector.h.
#include <memory>
#include <string>
#include <utility>

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/runtime/fault_injector.h"

namespace isobit {
namespace {

__global__ void FaultKernel() { __trap(); }

class FaultyExecutor final : public RankExecutor {
 public:
  FaultyExecutor(std::unique_ptr<RankExecutor> rank, const InjectedFault& fault)
      : rank_(std::move(rank)), fault_(fault) {}

  std::string backend() const override { return rank_->backend(); }
  int depth() const override { return rank_->depth(); }
  RankMemory memory() const override { return rank_->memory(); }
  absl::StatusOr<int32_t> KvPagesThatFit() const override { return rank_->KvPagesThatFit(); }
  absl::Status AllocateKvCache(int32_t num_pages) override {
    return rank_->AllocateKvCache(num_pages);
  }
  ResidentWeights* weights() override { return rank_->weights(); }
  absl::Status Collect(ModelStep& step) override { return rank_->Collect(step); }
  absl::Status Serve(const PreparedBlocks& prepared) override { return rank_->Serve(prepared); }

  absl::Status Launch(const ModelStep& step) override {
    if (num_launched_++ == fault_.step) {
      ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(fault_.device));
      FaultKernel<<<1, 1, 0, cudaStreamPerThread>>>();
      ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetLastError());
    }
    return rank_->Launch(step);
  }

 private:
  const std::unique_ptr<RankExecutor> rank_;
  const InjectedFault fault_;
  int64_t num_launched_ = 0;
};

}  // namespace

MakeRank WithFault(MakeRank make_rank, const InjectedFault& fault) {
  if (fault.rank < 0) return make_rank;
  return [make_rank = std::move(make_rank),
          fault](const RankOptions& options) -> absl::StatusOr<std::unique_ptr<RankExecutor>> {
    ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<RankExecutor> rank, make_rank(options));
    if (options.shape.rank != fault.rank) return rank;
    return std::make_unique<FaultyExecutor>(std::move(rank), fault);
  };
}

}  // namespace isobit
