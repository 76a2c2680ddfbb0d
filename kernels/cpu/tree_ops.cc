// See tree_ops.h.
#include "kernels/cpu/tree_ops.h"

#include "absl/strings/str_cat.h"
#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/row_ops.h"

namespace isobit::cpu {
namespace {

constexpr int64_t kElementGrain = 16384;  // elements of a sum that are worth waking a thread

}  // namespace

TreeOps::TreeOps(const CpuOptions& options)
    : name_(absl::StrCat("cpu/", std::string(IsaName(options.isa)))),
      rows_(GetRowKernels(options.isa)),
      pool_(options.num_threads),
      linear_(GetMmaPanels(options.isa), rows_, pool_),
      attention_(GetMmaPanels(options.isa), rows_, pool_),
      log_probs_(rows_, pool_) {}

absl::Status TreeOps::Embedding(const EmbeddingArgs& a) {
  cpu::Embedding(a);
  return absl::OkStatus();
}

absl::Status TreeOps::RmsNorm(const RmsNormArgs& a) {
  cpu::RmsNorm(a, rows_, pool_);
  return absl::OkStatus();
}

absl::Status TreeOps::SwiGlu(const SwiGluArgs& a) {
  cpu::SwiGlu(a, rows_, pool_);
  return absl::OkStatus();
}

absl::Status TreeOps::Qkv(const QkvArgs& a) {
  PrepareQkv(a, rows_, pool_);
  return absl::OkStatus();
}

absl::Status TreeOps::Attention(const AttentionArgs& a) {
  attention_.Run(a);
  return absl::OkStatus();
}

absl::Status TreeOps::Reduce(const ReduceArgs& a) {
  pool_.ParallelFor(a.end - a.begin, kElementGrain, [&](int64_t begin, int64_t end, int) {
    ReduceElements(a, a.begin + begin, a.begin + end);
  });
  return absl::OkStatus();
}

void TreeOps::ReduceElements(const ReduceArgs& a, int64_t begin, int64_t end) {
  const float* partials[contract::kLeaves];
  for (int r = 0; r < a.num_ranks; ++r) partials[r] = a.partials[r] + begin;
  rows_.tree_sum(partials, a.num_ranks, a.out + begin, end - begin);
}

absl::Status TreeOps::LogProbs(const LogProbArgs& a) {
  log_probs_.Run(a);
  return absl::OkStatus();
}

absl::Status TreeOps::Product(const LinearArgs& a) {
  linear_.Run(a);
  return absl::OkStatus();
}

}  // namespace isobit::cpu
