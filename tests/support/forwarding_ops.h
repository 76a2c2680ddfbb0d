// A backend that forwards every op to another one. Tests override the op that they want to watch,
// delay, fail or corrupt.
#ifndef ISOBIT_TESTS_SUPPORT_FORWARDING_OPS_H_
#define ISOBIT_TESTS_SUPPORT_FORWARDING_OPS_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "kernels/ops.h"

namespace isobit::testing_support {

class ForwardingOps : public Ops {
 public:
  explicit ForwardingOps(std::unique_ptr<Ops> ops) : ops_(std::move(ops)) {}

  const char* name() const override { return ops_->name(); }
  Device& device() override { return ops_->device(); }
  StepTables& tables() override { return ops_->tables(); }
  const WeightPacker& packer() const override { return ops_->packer(); }
  absl::Status Linear(const LinearArgs& args) override { return ops_->Linear(args); }
  absl::Status Embedding(const EmbeddingArgs& args) override { return ops_->Embedding(args); }
  absl::Status RmsNorm(const RmsNormArgs& args) override { return ops_->RmsNorm(args); }
  absl::Status SwiGlu(const SwiGluArgs& args) override { return ops_->SwiGlu(args); }
  absl::Status Qkv(const QkvArgs& args) override { return ops_->Qkv(args); }
  absl::Status Attention(const AttentionArgs& args) override { return ops_->Attention(args); }
  absl::Status CopyPages(const CopyPagesArgs& args) override { return ops_->CopyPages(args); }
  absl::Status Reduce(const ReduceArgs& args) override { return ops_->Reduce(args); }
  absl::Status LogProbs(const LogProbArgs& args) override { return ops_->LogProbs(args); }

 private:
  const std::unique_ptr<Ops> ops_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_FORWARDING_OPS_H_
