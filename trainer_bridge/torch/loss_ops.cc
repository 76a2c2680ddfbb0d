// Losses of tokens, what other losses are made of, and their sums.
#include <algorithm>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/contract/losses.h"
#include "trainer_bridge/torch/call.h"
#include "trainer_bridge/torch/operators.h"

namespace isobit::bridge {
namespace {

std::tuple<Tensor, Tensor> PolicyLoss(const Tensor& logprobs, const Tensor& advantages,
                                      const Tensor& weights, const MaybeTensor& old_logprobs,
                                      const MaybeTensor& reference_logprobs, double clip_low,
                                      double clip_high, double kl) {
  const Call call("policy_loss", logprobs);
  PolicyLossArgs a;
  a.tokens = call.Length("logprobs", logprobs);
  a.logprobs = call.In<float>("logprobs", logprobs, {a.tokens});
  a.advantages = call.In<float>("advantages", advantages, {a.tokens});
  a.weights = call.In<float>("weights", weights, {a.tokens});
  a.old_logprobs = call.In<float>("old_logprobs", old_logprobs, {a.tokens});
  a.reference_logprobs = call.In<float>("reference_logprobs", reference_logprobs, {a.tokens});
  a.clip_low = static_cast<float>(clip_low);
  a.clip_high = static_cast<float>(clip_high);
  a.kl = static_cast<float>(kl);
  Tensor values = call.New<float>({a.tokens}, &a.values);
  Tensor gradients = call.New<float>({a.tokens}, &a.gradients);
  call.Run(a);
  return {values, gradients};
}

// Returns values and gradients.
std::tuple<Tensor, Tensor> LossFunction(const Tensor& x, const std::string& function) {
  using enum contract::LossFunction;
  const std::pair<const char*, contract::LossFunction> functions[] = {
      {"exp", kExp}, {"log", kLog}, {"sigmoid", kSigmoid}, {"log_sigmoid", kLogSigmoid}};
  const auto* const found = std::ranges::find(
      functions, function, &std::pair<const char*, contract::LossFunction>::first);
  const Call call("loss_function", x);
  call.Require(found != std::end(functions), "function", "exp, log, sigmoid or log_sigmoid",
               function);
  LossFunctionArgs a;
  a.function = found->second;
  a.count = call.Length("x", x);
  a.x = call.In<float>("x", x, {a.count});
  Tensor values = call.New<float>({a.count}, &a.values);
  Tensor gradients = call.New<float>({a.count}, &a.gradients);
  call.Run(a);
  return {values, gradients};
}

Tensor TreeSum(const Tensor& x) {
  const Call call("tree_sum", x);
  TreeSumArgs a;
  a.count = call.Length("x", x);
  a.x = call.In<float>("x", x, {a.count});
  Tensor sum = call.New<float>({}, &a.sum);
  call.Run(a);
  return sum;
}

Tensor SequenceSums(const Tensor& x, const Tensor& bounds) {
  const Call call("sequence_sums", x);
  const int64_t count = call.Length("x", x);
  SequenceSumsArgs a;
  a.sequences = call.Length("bounds", bounds) - 1;
  call.Require(a.sequences >= 0, "bounds", "at least one", "none");
  a.x = call.In<float>("x", x, {count});
  a.bounds = call.In<int32_t>("bounds", bounds, {a.sequences + 1});
  call.CheckBounds("bounds", bounds, count);
  Tensor sums = call.New<float>({a.sequences}, &a.sums);
  call.Run(a);
  return sums;
}

constexpr Operator kOperators[] = {
    {"policy_loss(Tensor logprobs, Tensor advantages, Tensor weights, Tensor? old_logprobs,"
     " Tensor? reference_logprobs, float clip_low, float clip_high, float kl)"
     " -> (Tensor, Tensor)",
     TORCH_BOX(&PolicyLoss), "like(logprobs), like(logprobs)"},
    {"loss_function(Tensor x, str function) -> (Tensor, Tensor)", TORCH_BOX(&LossFunction),
     "like(x), like(x)"},
    {"tree_sum(Tensor x) -> Tensor", TORCH_BOX(&TreeSum), "fp32()"},
    {"sequence_sums(Tensor x, Tensor bounds) -> Tensor", TORCH_BOX(&SequenceSums),
     "fp32(bounds.shape[0] - 1)"},
};

}  // namespace

ISOBIT_OPERATORS(kOperators)

}  // namespace isobit::bridge
