// lm_head with its logprobs, by blocks of rows so that nobody keeps rows x vocabulary.
#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/contract/leaf_plan.h"
#include "trainer_bridge/torch/call.h"
#include "trainer_bridge/torch/operators.h"

namespace isobit::bridge {
namespace {

// LogProbRow as a tensor: int32 [rows, 6], its bits.
constexpr int64_t kStateWords = sizeof(LogProbRow) / sizeof(int32_t);
static_assert(sizeof(LogProbRow) == 6 * sizeof(int32_t));

// lm_head and the rows whose logprobs are asked for.
class Head {
 public:
  Head(const Call& call, const Tensor& hidden, const Tensor& weight, const Tensor& targets,
       const MaybeTensor& temperature, const MaybeTensor& top_k, const MaybeTensor& top_p,
       const MaybeTensor& min_p, int64_t block_rows)
      : call_(call) {
    std::tie(rows, columns) = call.MatrixShape("hidden", hidden);
    vocab = call.MatrixShape("weight", weight).first;
    call.Require(block_rows > 0 && block_rows % 16 == 0, "block_rows", "a multiple of 16",
                 absl::StrCat(block_rows));
    block = std::min(block_rows, rows);
    this->hidden = call.In<Bf16>("hidden", hidden, {rows, columns});
    this->weight.data[0] = call.In<Bf16>("weight", weight, {vocab, columns});
    this->weight.rows[0] = vocab;
    this->weight.columns = columns;
    this->targets = call.In<int32_t>("targets", targets, {rows});
    call.CheckRange("targets", targets, vocab);
    sampling_.temperature = call.In<float>("temperature", temperature, {rows});
    sampling_.top_k = call.In<int32_t>("top_k", top_k, {rows});
    sampling_.top_p = call.In<float>("top_p", top_p, {rows});
    sampling_.min_p = call.In<float>("min_p", min_p, {rows});
    // No comparison holds for NaN, which the filters would take for none.
    call.CheckEach<float>("temperature", temperature, "values of 0, or 0.001 to 1000",
                          [](float t) { return t == 0 || (t >= 0.001f && t <= 1000); });
    call.CheckEach<int32_t>("top_k", top_k, "values from -1 on", [](int32_t k) { return k >= -1; });
    call.CheckEach<float>("top_p", top_p, "values above 0, up to 1",
                          [](float p) { return p > 0 && p <= 1; });
    call.CheckEach<float>("min_p", min_p, "values from 0 to 1",
                          [](float p) { return p >= 0 && p <= 1; });
    logits_ = call.New<float>({block, vocab}, &logits);
  }

  // Rows of the block that begins at `begin`.
  int64_t BlockRows(int64_t begin) const { return std::min(block, rows - begin); }
  TrainingSampling SamplingFrom(int64_t row) const {
    const auto at = [row](auto* p) { return p != nullptr ? p + row : nullptr; };
    return {at(sampling_.temperature), at(sampling_.top_k), at(sampling_.top_p),
            at(sampling_.min_p)};
  }
  // Makes the logits of that block.
  void ComputeLogits(int64_t begin) const {
    StackedLinearArgs a;
    a.x = hidden + begin * columns;
    a.ldx = columns;
    a.m = BlockRows(begin);
    a.weight = weight;
    a.leaves = contract::PlanColumns(columns);
    a.fp32_out = logits;
    call_.Run(a);
  }

  int64_t rows = 0;
  int64_t columns = 0;
  int64_t vocab = 0;
  int64_t block = 0;
  const Bf16* hidden = nullptr;
  StackedWeight weight;
  const int32_t* targets = nullptr;
  float* logits = nullptr;  // [block, vocab]

 private:
  const Call& call_;
  TrainingSampling sampling_;
  Tensor logits_;
};

Tensor Logits(const Tensor& hidden, const Tensor& weight) {
  const Call call("logits", hidden);
  StackedLinearArgs a;
  std::tie(a.m, a.ldx) = call.MatrixShape("hidden", hidden);
  a.x = call.In<Bf16>("hidden", hidden, {a.m, a.ldx});
  a.weight.columns = a.ldx;
  a.weight.rows[0] = call.MatrixShape("weight", weight).first;
  a.weight.data[0] = call.In<Bf16>("weight", weight, {a.weight.rows[0], a.ldx});
  a.leaves = contract::PlanColumns(a.ldx);
  Tensor logits = call.New<float>({a.m, a.weight.rows[0]}, &a.fp32_out);
  call.Run(a);
  return logits;
}

// Two ops for each block of `block_rows` rows: the logits, then their logprobs.
std::tuple<Tensor, Tensor, Tensor> LogProbs(const Tensor& hidden, const Tensor& weight,
                                            const Tensor& targets, const MaybeTensor& temperature,
                                            const MaybeTensor& top_k, const MaybeTensor& top_p,
                                            const MaybeTensor& min_p, int64_t block_rows,
                                            const Bounds& packs) {
  const Call call("logprobs", hidden);
  const Head head(call, hidden, weight, targets, temperature, top_k, top_p, min_p, block_rows);
  call.Packs(packs, head.rows);
  float* logprobs = nullptr;
  float* entropies = nullptr;
  int32_t* state = nullptr;
  Tensor logprobs_out = call.New<float>({head.rows}, &logprobs);
  Tensor entropies_out = call.New<float>({head.rows}, &entropies);
  Tensor state_out = call.New<int32_t>({head.rows, kStateWords}, &state);
  for (int64_t begin = 0; begin < head.rows; begin += head.block) {
    head.ComputeLogits(begin);
    TrainingLogProbsArgs a;
    a.logits = head.logits;
    a.rows = head.BlockRows(begin);
    a.vocab = head.vocab;
    a.targets = head.targets + begin;
    a.sampling = head.SamplingFrom(begin);
    a.logprobs = logprobs + begin;
    a.entropies = entropies + begin;
    a.state = reinterpret_cast<LogProbRow*>(state) + begin;
    call.Run(a);
  }
  return {logprobs_out, entropies_out, state_out};
}

// The rows of one pack. Four ops per block: logits, then the gradients of logits, input, weight.
std::tuple<Tensor, Tensor> LogProbsBackward(const Tensor& dlogprobs, const MaybeTensor& dentropies,
                                            const Tensor& hidden, const Tensor& weight,
                                            const Tensor& targets, const MaybeTensor& temperature,
                                            const MaybeTensor& top_k, const MaybeTensor& top_p,
                                            const MaybeTensor& min_p, const Tensor& state,
                                            int64_t block_rows) {
  const Call call("logprobs_backward", hidden);
  const Head head(call, hidden, weight, targets, temperature, top_k, top_p, min_p, block_rows);
  const float* g = call.In<float>("dlogprobs", dlogprobs, {head.rows});
  const float* h = call.In<float>("dentropies", dentropies, {head.rows});
  const auto* rows_state = reinterpret_cast<const LogProbRow*>(
      call.In<int32_t>("state", state, {head.rows, kStateWords}));
  Bf16* dhidden = nullptr;
  Bf16* dlogits = nullptr;
  float* dweight = nullptr;
  Tensor dhidden_out = call.New<Bf16>({head.rows, head.columns}, &dhidden);
  Tensor dlogits_block = call.New<Bf16>({head.block, head.vocab}, &dlogits);
  Tensor dweight_out = head.rows > 0 ? call.New<float>({head.vocab, head.columns}, &dweight)
                                     : call.NewZeros<float>({head.vocab, head.columns}, &dweight);
  for (int64_t begin = 0; begin < head.rows; begin += head.block) {
    const int64_t rows = head.BlockRows(begin);
    head.ComputeLogits(begin);
    LogProbGradientArgs logits;
    logits.logits = head.logits;
    logits.rows = rows;
    logits.vocab = head.vocab;
    logits.targets = head.targets + begin;
    logits.sampling = head.SamplingFrom(begin);
    logits.state = rows_state + begin;
    logits.dlogprobs = g + begin;
    logits.dentropies = h != nullptr ? h + begin : nullptr;
    logits.dlogits = dlogits;
    call.Run(logits);

    InputGradientArgs input;
    input.dy = dlogits;
    input.lddy = head.vocab;
    input.m = rows;
    input.weight = head.weight;
    input.dx = dhidden + begin * head.columns;
    call.Run(input);

    const int64_t bounds[] = {0, rows};
    WeightGradientArgs weights;
    weights.dy = dlogits;
    weights.lddy = head.vocab;
    weights.x = head.hidden + begin * head.columns;
    weights.ldx = head.columns;
    weights.packs = bounds;
    weights.part_rows[0] = head.vocab;
    weights.columns = head.columns;
    weights.dw[0] = dweight;
    weights.continues = begin > 0;
    call.Run(weights);
  }
  return {dhidden_out, dweight_out};
}

constexpr Operator kOperators[] = {
    {"logits(Tensor hidden, Tensor weight) -> Tensor", TORCH_BOX(&Logits),
     "fp32(hidden.shape[0], weight.shape[0])"},
    {"logprobs(Tensor hidden, Tensor weight, Tensor targets, Tensor? temperature, Tensor? top_k,"
     " Tensor? top_p, Tensor? min_p, int block_rows, int[] packs) -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&LogProbs),
     "fp32(hidden.shape[0]), fp32(hidden.shape[0]), int32(hidden.shape[0], 6)"},
    {"logprobs_backward(Tensor dlogprobs, Tensor? dentropies, Tensor hidden, Tensor weight,"
     " Tensor targets, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p,"
     " Tensor state, int block_rows) -> (Tensor, Tensor)",
     TORCH_BOX(&LogProbsBackward), "like(hidden), fp32(*weight.shape)"},
};

}  // namespace

ISOBIT_OPERATORS(kOperators)

}  // namespace isobit::bridge
