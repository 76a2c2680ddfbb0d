// See tree_ops.h.
#include "kernels/cpu/tree_ops.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cpu/mma_panel.h"

namespace isobit::cpu {
namespace {

constexpr int64_t kRowGrain = 4;  // the fewest rows of a row-wise op that are worth waking a thread
constexpr int64_t kElementGrain = 16384;  // likewise, elements of a sum

}  // namespace

TreeOps::TreeOps(const CpuOptions& options)
    : name_(absl::StrCat("cpu/", std::string(IsaName(options.isa)))),
      rows_(GetRowKernels(options.isa)),
      pool_(options.num_threads),
      linear_(GetMmaPanels(options.isa), rows_, pool_),
      attention_(GetMmaPanels(options.isa), rows_, pool_),
      log_probs_(rows_, pool_) {}

absl::Status TreeOps::Embedding(const EmbeddingArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    std::copy_n(a.table + a.ids[r] * a.hidden, a.hidden, a.out + r * a.hidden);
  }
  return absl::OkStatus();
}

absl::Status TreeOps::RmsNorm(const RmsNormArgs& a) {
  pool_.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      Bf16* residual = a.residual + r * a.hidden;
      if (a.sum != nullptr) {
        rows_.add_residual(residual, a.sum + r * a.hidden, a.bias, a.hidden);
      }
      const float inverse =
          contract::InverseRms(rows_.sum_of_squares(residual, a.hidden), a.hidden, a.eps);
      rows_.normalise(residual, inverse, a.weight, a.out + r * a.hidden, a.hidden);
    }
  });
  return absl::OkStatus();
}

absl::Status TreeOps::SwiGlu(const SwiGluArgs& a) {
  pool_.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const Bf16* gate = a.gate_up + r * 2 * a.columns;
      rows_.swiglu(gate, gate + a.columns, a.out + r * a.columns, a.columns);
    }
  });
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
