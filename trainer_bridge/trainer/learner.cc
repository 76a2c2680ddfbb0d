// Passes over slots of sequences, and the step of the optimizer.
#include "trainer_bridge/trainer/learner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "trainer_bridge/front/batch.h"
#include "trainer_bridge/front/ops.h"
#include "trainer_bridge/trainer/mean.h"
#include "trainer_bridge/trainer/stop_signal.h"

namespace isobit::trainer {
namespace {

front::TrainingSequence SequenceOf(const Completion& completion, double temperature) {
  front::TrainingSequence sequence;
  sequence.ids = completion.prompt;
  sequence.ids.insert(sequence.ids.end(), completion.tokens.begin(), completion.tokens.end());
  sequence.prompt_length = static_cast<int64_t>(completion.prompt.size());
  sequence.temperature = static_cast<float>(temperature);
  return sequence;
}

// A tensor that lies in host memory, row after row.
Tensor ViewOf(const std::string& name, const torch::Tensor& tensor) {
  ISOBIT_CHECK(tensor.is_contiguous() && tensor.device().is_cpu()) << name;
  Tensor view;
  view.name = name;
  view.dtype = tensor.scalar_type() == torch::kBFloat16 ? DType::kBf16 : DType::kF32;
  view.shape = tensor.sizes().vec();
  view.data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  view.size_bytes = tensor.nbytes();
  return view;
}

// An operator that refuses its arguments throws; here that becomes a status.
absl::Status StatusOf(const c10::Error& error) {
  return absl::InternalError(error.what_without_backtrace());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Learner>> Learner::Load(const Recipe& recipe) {
  ISOBIT_ASSIGN_OR_RETURN(auto decoder, front::Decoder::Load(recipe.model));
  ISOBIT_ASSIGN_OR_RETURN(
      front::AdamW optimizer,
      front::AdamW::Create(front::ParametersOf(*decoder),
                           {.lr = recipe.lr, .weight_decay = recipe.weight_decay}));
  return std::unique_ptr<Learner>(new Learner(recipe, std::move(decoder), std::move(optimizer)));
}

Learner::Learner(const Recipe& recipe, std::shared_ptr<front::Decoder> decoder,
                 front::AdamW optimizer)
    : recipe_(recipe),
      decoder_(std::move(decoder)),
      parameters_(front::ParametersOf(*decoder_)),
      optimizer_(std::move(optimizer)) {}

absl::StatusOr<Learner::Differentiated> Learner::Gradients(absl::Span<const Completion> completions,
                                                           absl::Span<const double> advantages) {
  try {
    return TryGradients(completions, advantages);
  } catch (const c10::Error& error) {
    return StatusOf(error);
  }
}

absl::StatusOr<Learner::Differentiated> Learner::TryGradients(
    absl::Span<const Completion> completions, absl::Span<const double> advantages) {
  std::vector<int64_t> lengths;
  size_t tokens = 0;
  for (const Completion& c : completions) {
    lengths.push_back(static_cast<int64_t>(c.prompt.size() + c.tokens.size()));
    tokens += c.tokens.size();
  }
  ISOBIT_ASSIGN_OR_RETURN(const auto slots,
                          front::CutIntoSlots(lengths, recipe_.pack_tokens, recipe_.lanes));
  // The loss is the mean over the tokens of the whole batch.
  const auto token_weight = static_cast<float>(1.0 / static_cast<double>(tokens));
  Differentiated result;
  std::vector<double> entropies;
  size_t begin = 0;
  for (const std::vector<int64_t>& packs : slots) {
    if (StopAsked()) return absl::CancelledError("stopped");
    const auto count = static_cast<size_t>(std::accumulate(packs.begin(), packs.end(), int64_t{0}));
    ISOBIT_RETURN_IF_ERROR(AddPass(completions.subspan(begin, count),
                                   advantages.subspan(begin, count), packs, token_weight,
                                   &result.logprobs, &entropies));
    begin += count;
  }
  result.entropy = Mean(entropies);
  return result;
}

absl::Status Learner::AddPass(absl::Span<const Completion> completions,
                              absl::Span<const double> advantages, absl::Span<const int64_t> packs,
                              float token_weight, Logprobs* logprobs,
                              std::vector<double>* entropies) {
  std::vector<front::TrainingSequence> sequences;
  std::vector<float> token_advantages;
  for (size_t i = 0; i < completions.size(); ++i) {
    sequences.push_back(SequenceOf(completions[i], recipe_.temperature));
    token_advantages.insert(token_advantages.end(), completions[i].tokens.size(),
                            static_cast<float>(advantages[i]));
  }
  ISOBIT_ASSIGN_OR_RETURN(const front::TrainingBatch batch, front::MakeBatch(sequences, packs));
  ISOBIT_ASSIGN_OR_RETURN(const front::Scores scores, decoder_->Score(batch));
  const torch::Tensor a = torch::tensor(token_advantages, torch::kFloat32);
  const bool is_clipped = recipe_.algorithm == "grpo";
  // The ratio's denominator is the policy that drew the tokens: this very pass, so the ratio is
  // exactly 1.
  front::PolicyLossOptions options;
  options.old_logprobs = scores.logprobs.detach();
  options.clip_low = is_clipped ? recipe_.clip : 1.0;
  options.clip_high = is_clipped ? recipe_.clip : std::numeric_limits<double>::infinity();
  front::PolicyLoss(scores.logprobs, a, torch::full_like(a, token_weight), options).backward();

  const torch::Tensor computed = scores.logprobs.detach().contiguous();
  const torch::Tensor entropy = scores.entropies.detach().contiguous();
  const float* next = computed.const_data_ptr<float>();
  for (const Completion& c : completions) {
    logprobs->emplace_back(next, next + c.tokens.size());
    next += c.tokens.size();
  }
  const float* first = entropy.const_data_ptr<float>();
  entropies->insert(entropies->end(), first, first + entropy.numel());
  return absl::OkStatus();
}

absl::StatusOr<double> Learner::Step() {
  try {
    ISOBIT_ASSIGN_OR_RETURN(const double norm, front::ClipGradNorm(parameters_, recipe_.max_norm));
    ISOBIT_RETURN_IF_ERROR(optimizer_.Step());
    return norm;
  } catch (const c10::Error& error) {
    return StatusOf(error);
  }
}

void Learner::Drop() {
  for (const auto& [name, parameter] : parameters_) parameter.mutable_grad().reset();
}

std::vector<Tensor> Learner::Weights() const {
  std::vector<Tensor> weights;
  for (const auto& [name, parameter] : parameters_) weights.push_back(ViewOf(name, parameter));
  std::stable_partition(weights.begin(), weights.end(),
                        [](const Tensor& tensor) { return tensor.shape.size() < 2; });
  return weights;
}

std::map<std::string, torch::Tensor> Learner::NamedState() {
  std::map<std::string, torch::Tensor> named;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const front::AdamW::State& state = optimizer_.state()[i];
    named["master." + parameters_[i].first] = state.master;
    named["exp_avg." + parameters_[i].first] = state.m;
    named["exp_avg_sq." + parameters_[i].first] = state.v;
  }
  return named;
}

std::vector<Tensor> Learner::State() {
  std::vector<Tensor> state;
  for (const auto& [name, tensor] : NamedState()) state.push_back(ViewOf(name, tensor));
  return state;
}

absl::Status Learner::Restore(absl::Span<const Tensor> state, int64_t steps) {
  std::map<std::string, torch::Tensor> named = NamedState();
  for (const Tensor& saved : state) {
    const auto found = named.find(saved.name);
    if (found == named.end() || saved.dtype != DType::kF32 ||
        saved.shape != found->second.sizes().vec()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the checkpoint's ", saved.name, " is not of this model"));
    }
    std::memcpy(found->second.data_ptr(), saved.data, saved.size_bytes);
    named.erase(found);
  }
  if (!named.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the checkpoint lacks ", named.begin()->first));
  }
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    front::AdamW::State& own = optimizer_.state()[i];
    own.steps = steps;  // every parameter has a gradient in every step
    torch::Tensor parameter = parameters_[i].second;
    parameter.copy_(own.master);
  }
  return absl::OkStatus();
}

}  // namespace isobit::trainer
