// A rank that forwards every call to another one. Tests override the call that they want to watch,
// delay or fail.
#ifndef ISOBIT_TESTS_SUPPORT_FORWARDING_RANK_H_
#define ISOBIT_TESTS_SUPPORT_FORWARDING_RANK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "kernels/runtime/rank_executor.h"

namespace isobit::testing_support {

class ForwardingRank : public RankExecutor {
 public:
  explicit ForwardingRank(std::unique_ptr<RankExecutor> rank) : rank_(std::move(rank)) {}

  std::string backend() const override { return rank_->backend(); }
  RankMemory memory() const override { return rank_->memory(); }
  int depth() const override { return rank_->depth(); }
  bool has_variant() const override { return rank_->has_variant(); }
  absl::StatusOr<CacheSize> CacheThatFits(const CacheSize& most) const override {
    return rank_->CacheThatFits(most);
  }
  absl::Status AllocateKvCache(const CacheSize& size) override {
    return rank_->AllocateKvCache(size);
  }
  absl::Status Launch(const ModelStep& step) override { return rank_->Launch(step); }
  absl::Status Collect(ModelStep& step) override { return rank_->Collect(step); }
  ProbedRank* probed() override { return rank_->probed(); }
  ResidentWeights* weights() override { return rank_->weights(); }
  KvCache* kv_cache() override { return rank_->kv_cache(); }
  absl::Status Serve(const PreparedBlocks& prepared) override { return rank_->Serve(prepared); }

 private:
  const std::unique_ptr<RankExecutor> rank_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_FORWARDING_RANK_H_
