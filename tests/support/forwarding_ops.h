// A backend that hands every op on to another one: tests override the op that they want to watch,
// delay, fail or spoil.
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
  absl::StatusOr<Memory> Allocate(size_t bytes) override { return ops_->Allocate(bytes); }
  absl::StatusOr<std::shared_ptr<const std::byte>> Share(std::shared_ptr<const std::byte> host,
                                                         size_t bytes) override {
    return ops_->Share(std::move(host), bytes);
  }
  absl::StatusOr<Memory> AllocateBeside(size_t bytes) override {
    return ops_->AllocateBeside(bytes);
  }
  absl::Status Upload(void* to, const void* from, size_t bytes) override {
    return ops_->Upload(to, from, bytes);
  }
  absl::Status Copy(void* to, const void* from, size_t bytes) override {
    return ops_->Copy(to, from, bytes);
  }
  absl::Status Synchronize() override { return ops_->Synchronize(); }
  absl::StatusOr<StagedStep> Stage(absl::Span<const int32_t> ids,
                                   absl::Span<const SequenceRows> sequences,
                                   int32_t page_size) override {
    return ops_->Stage(ids, sequences, page_size);
  }
  absl::StatusOr<SequenceTable> StageHalf(int half, absl::Span<const SequenceRows> sequences,
                                          int32_t page_size) override {
    return ops_->StageHalf(half, sequences, page_size);
  }
  size_t PackedBytes(const LinearShape& shape) const override { return ops_->PackedBytes(shape); }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    ops_->Pack(shape, w, ldw, packed);
  }
  absl::Status Linear(const LinearArgs& args) override { return ops_->Linear(args); }
  absl::Status Embedding(const EmbeddingArgs& args) override { return ops_->Embedding(args); }
  absl::Status RmsNorm(const RmsNormArgs& args) override { return ops_->RmsNorm(args); }
  absl::Status SwiGlu(const SwiGluArgs& args) override { return ops_->SwiGlu(args); }
  absl::Status Qkv(const QkvArgs& args) override { return ops_->Qkv(args); }
  absl::Status Attention(const AttentionArgs& args) override { return ops_->Attention(args); }
  absl::Status Reduce(const ReduceArgs& args) override { return ops_->Reduce(args); }
  absl::Status LogProbs(const LogProbArgs& args) override { return ops_->LogProbs(args); }

 private:
  const std::unique_ptr<Ops> ops_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_FORWARDING_OPS_H_
