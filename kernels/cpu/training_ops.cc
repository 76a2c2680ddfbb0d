// Joins the families of training ops; the sums and the optimizer themselves. See training_ops.h.
#include "kernels/cpu/training_ops.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/losses.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/log_probs.h"
#include "kernels/cpu/row_ops.h"
#include "kernels/cpu/training_attention.h"
#include "kernels/cpu/training_products.h"
#include "kernels/cpu/training_rows.h"

namespace isobit {
namespace cpu {
namespace {

constexpr int64_t kElementGrain = 16384;  // elements that are worth waking a thread

template <typename T>
T BalancedSumOf(const T* x, int64_t count) {
  contract::BalancedSum<T> tree;
  for (int64_t i = 0; i < count; ++i) tree.Push(x[i]);
  return tree.Total();
}

// Elements [begin, end) of a's: a block of noise at a time.
void DitherPart(const DitherArgs& a, int64_t begin, int64_t end) {
  constexpr uint64_t kWidth = contract::kDitherWidth;
  while (begin < end) {
    const uint64_t at = a.first + static_cast<uint64_t>(begin);
    const auto in_block = static_cast<int64_t>(kWidth - at % kWidth);
    const int64_t stop = std::min(end, begin + in_block);
    const contract::PhiloxBlock block = contract::DitherNoise(a.step, a.moment, at / kWidth);
    for (uint64_t i = at; begin < stop; ++begin, ++i) {
      a.out[begin] = contract::DitherBf16(a.x[begin], contract::DitherOf(block, i));
    }
  }
}

class CpuTrainingOps final : public TrainingOps {
 public:
  explicit CpuTrainingOps(const CpuOptions& options)
      : name_(absl::StrCat("cpu/", std::string(IsaName(options.isa)))),
        rows_(GetRowKernels(options.isa)),
        pool_(options.num_threads),
        products_(GetMmaPanels(options.isa), rows_, pool_),
        row_functions_(rows_, pool_),
        attention_(GetMmaPanels(options.isa), rows_, pool_),
        attention_gradient_(GetMmaPanels(options.isa), rows_, pool_),
        log_probs_(rows_, pool_) {}

  const char* name() const override { return name_.c_str(); }

  absl::Status Embedding(const EmbeddingArgs& a) override {
    cpu::Embedding(a);
    return absl::OkStatus();
  }
  absl::Status RmsNorm(const RmsNormArgs& a) override {
    cpu::RmsNorm(a, rows_, pool_);
    return absl::OkStatus();
  }
  absl::Status SwiGlu(const SwiGluArgs& a) override {
    cpu::SwiGlu(a, rows_, pool_);
    return absl::OkStatus();
  }
  absl::Status StackedLinear(const StackedLinearArgs& a) override {
    products_.StackedLinear(a);
    return absl::OkStatus();
  }
  absl::Status InputGradient(const InputGradientArgs& a) override {
    products_.InputGradient(a);
    return absl::OkStatus();
  }
  absl::Status WeightGradient(const WeightGradientArgs& a) override {
    products_.WeightGradient(a);
    return absl::OkStatus();
  }
  absl::Status ColumnSums(const ColumnSumsArgs& a) override {
    row_functions_.ColumnSums(a);
    return absl::OkStatus();
  }
  absl::Status RmsNormGradient(const RmsNormGradientArgs& a) override {
    row_functions_.RmsNormGradient(a);
    return absl::OkStatus();
  }
  absl::Status SwiGluGradient(const SwiGluGradientArgs& a) override {
    row_functions_.SwiGluGradient(a);
    return absl::OkStatus();
  }
  absl::Status TrainingQkv(const TrainingQkvArgs& a) override {
    row_functions_.TrainingQkv(a);
    return absl::OkStatus();
  }
  absl::Status QkvGradient(const QkvGradientArgs& a) override {
    row_functions_.QkvGradient(a);
    return absl::OkStatus();
  }
  absl::Status EmbeddingGradient(const EmbeddingGradientArgs& a) override {
    row_functions_.EmbeddingGradient(a);
    return absl::OkStatus();
  }
  absl::Status TrainingAttention(const TrainingAttentionArgs& a) override;
  absl::Status AttentionGradient(const AttentionGradientArgs& a) override {
    attention_gradient_.Run(a);
    return absl::OkStatus();
  }
  absl::Status TrainingLogProbs(const TrainingLogProbsArgs& a) override {
    log_probs_.Run(a);
    return absl::OkStatus();
  }
  absl::Status LogProbGradient(const LogProbGradientArgs& a) override {
    log_probs_.Run(a);
    return absl::OkStatus();
  }
  absl::Status PolicyLoss(const PolicyLossArgs& a) override;
  absl::Status LossFunction(const LossFunctionArgs& a) override {
    pool_.ParallelFor(a.count, kElementGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const contract::ValueAndGradient result = contract::Evaluate(a.function, a.x[i]);
        a.values[i] = result.value;
        a.gradients[i] = result.gradient;
      }
    });
    return absl::OkStatus();
  }
  absl::Status TreeSum(const TreeSumArgs& a) override {
    *a.sum = BalancedSumOf(a.x, a.count);
    return absl::OkStatus();
  }
  absl::Status SequenceSums(const SequenceSumsArgs& a) override {
    pool_.ParallelFor(a.sequences, kRowGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        a.sums[i] = BalancedSumOf(a.x + a.bounds[i], a.bounds[i + 1] - a.bounds[i]);
      }
    });
    return absl::OkStatus();
  }
  absl::Status SquareSums(const SquareSumsArgs& a) override {
    pool_.ParallelFor(a.rows, std::max<int64_t>(kElementGrain / a.columns, 1),
                      [&](int64_t begin, int64_t end, int) {
                        for (int64_t r = begin; r < end; ++r) {
                          a.sums[r] = rows_.square_tree(a.x + r * a.columns, a.columns);
                        }
                      });
    return absl::OkStatus();
  }
  absl::Status WeightSums(const WeightSumsArgs& a) override {
    AddWeightSums(a.from, a.part, a.sums);
    return absl::OkStatus();
  }
  absl::Status TreeSum64(const TreeSum64Args& a) override {
    *a.sum = BalancedSumOf(a.x, a.count);
    return absl::OkStatus();
  }
  absl::Status AdamW(const AdamWArgs& a) override {
    pool_.ParallelFor(a.count, kElementGrain, [&](int64_t begin, int64_t end, int) {
      rows_.adamw(a.step, a.gradient + begin, end - begin, a.parameter + begin, a.m + begin,
                  a.v + begin, a.working != nullptr ? a.working + begin : nullptr);
    });
    return absl::OkStatus();
  }
  absl::Status Dither(const DitherArgs& a) override {
    pool_.ParallelFor(a.count, kElementGrain,
                      [&](int64_t begin, int64_t end, int) { DitherPart(a, begin, end); });
    return absl::OkStatus();
  }

 private:
  const std::string name_;
  const RowKernels& rows_;
  ThreadPool pool_;
  TrainingProducts products_;
  TrainingRows row_functions_;
  AttentionOp attention_;
  AttentionGradientOp attention_gradient_;
  LogProbsOp log_probs_;
};

// k and v are a cache with pages of one position, whose numbers are the rows.
absl::Status CpuTrainingOps::TrainingAttention(const TrainingAttentionArgs& a) {
  const int64_t width = int64_t{a.heads} * a.head_dim;
  ClearOutside(a.sequences, a.rows, width, a.out);
  std::vector<int32_t> pages(static_cast<size_t>(a.rows));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<SequenceRows> sequences;
  for (size_t i = 0; i + 1 < a.sequences.bounds.size(); ++i) {
    const int64_t begin = a.sequences.bounds[i];
    sequences.push_back({.first_row = begin,
                         .num_rows = a.sequences.bounds[i + 1] - begin,
                         .first_position = 0,
                         .pages = pages.data() + begin});
  }
  attention_.Run({.q = a.q,
                  .ldq = width,
                  .heads = a.heads,
                  .sequences = {.host = sequences},
                  .kv = {const_cast<Bf16*>(a.k), const_cast<Bf16*>(a.v), 1, a.kv_heads, a.head_dim},
                  .scale = a.scale,
                  .window = a.window,
                  .out = a.out,
                  .ldo = width},
                 a.log_sums, a.rows);
  return absl::OkStatus();
}

absl::Status CpuTrainingOps::PolicyLoss(const PolicyLossArgs& a) {
  ISOBIT_RETURN_IF_ERROR(CheckBounds(a));
  for (int64_t i = 0; i < a.tokens; ++i) {
    contract::ValueAndGradient loss =
        a.old_logprobs == nullptr ? contract::PolicyGradientLoss(a.logprobs[i], a.advantages[i])
                                  : contract::ClippedLoss(a.logprobs[i], a.old_logprobs[i],
                                                          a.advantages[i], a.clip_low, a.clip_high);
    if (a.reference_logprobs != nullptr) {
      loss = contract::AddReferenceKl(loss, a.logprobs[i], a.reference_logprobs[i], a.kl);
    }
    a.values[i] = contract::Mul(loss.value, a.weights[i]);
    a.gradients[i] = contract::Mul(loss.gradient, a.weights[i]);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace cpu

std::unique_ptr<TrainingOps> MakeCpuTrainingOps(const CpuOptions& options) {
  ISOBIT_CHECK(options.isa <= cpu::DetectIsa())
      << "instruction set " << cpu::IsaName(options.isa) << ", this machine runs "
      << cpu::IsaName(cpu::DetectIsa());
  ISOBIT_CHECK(options.mode == NumericsMode::kTree) << "training has mode tree alone";
  return std::make_unique<cpu::CpuTrainingOps>(options);
}

}  // namespace isobit
