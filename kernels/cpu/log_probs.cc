// Processes one row of logits after the other: C7 and C8 over blocks of the vocabulary. Tests
// compare it with the oracle, which sorts.
#include "kernels/cpu/log_probs.h"

#include <algorithm>
#include <optional>

#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/log_prob.h"
#include "kernels/contract/sampling.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/top_tokens.h"

namespace isobit::cpu {
namespace {

using contract::kMinusInfinity;

// No Gumbel value is larger: u >= 2^-33, and -log(2^-33) = 22.87.
constexpr float kMaxGumbel = 23.0f;

const float kNaN = contract::FromBits(0x7fffffffu);

RowSampling SamplingOf(const TrainingSampling& s, int64_t row) {
  RowSampling sampling;
  if (s.temperature != nullptr) sampling.temperature = s.temperature[row];
  if (s.top_k != nullptr) sampling.top_k = s.top_k[row];
  if (s.top_p != nullptr) sampling.top_p = s.top_p[row];
  if (s.min_p != nullptr) sampling.min_p = s.min_p[row];
  return sampling;
}

}  // namespace

// The buffers and steps of one row.
class LogProbsOp::Worker {
 public:
  // logits: [vocab].
  void Run(const RowKernels& kernels, const float* logits, int64_t vocab,
           const LogProbRequest& request, LogProbResult& result);
  // Row `row` of a pass.
  void Run(const RowKernels& kernels, const TrainingLogProbsArgs& a, int64_t row);
  void Run(const RowKernels& kernels, const LogProbGradientArgs& a, int64_t row);

 private:
  // z_ = the row's logits after steps 1 to 6 of C8; false if the row fails.
  bool MakeRow(const RowKernels& kernels, const float* logits, int64_t vocab, const RowSampling& s);
  RankedToken LastFinite() const;
  bool Process(const RowKernels& kernels, const float* logits, int64_t vocab, const RowSampling& s);
  void Filter(const RowKernels& kernels, const RowSampling& s);
  std::optional<RankedToken> LastKept(const RowKernels& kernels, const RowSampling& s, float max);
  int32_t Draw(const RowKernels& kernels, const RowSampling& s) const;
  contract::VocabSum SumVocab(const RowKernels& kernels, bool want_entropy) const;
  void WriteTop(const contract::VocabSum& sum, std::vector<TokenLogProb>& top);

  void FindBlockMaxima(const RowKernels& kernels);
  int64_t vocab() const { return static_cast<int64_t>(z_.size()); }
  BlockedRow blocked() const { return {z_.data(), vocab(), block_max_.data()}; }

  std::vector<float> z_;
  std::vector<float> block_max_;  // of z_
  std::vector<float> selection_;
  std::vector<WeightedToken> tokens_;
};

void LogProbsOp::Worker::Run(const RowKernels& kernels, const float* logits, int64_t vocab,
                             const LogProbRequest& request, LogProbResult& result) {
  result.finite = MakeRow(kernels, logits, vocab, request.sampling);
  if (!result.finite) return;
  result.token.id = request.target >= 0 ? request.target : Draw(kernels, request.sampling);
  if (request.raw) {
    z_.assign(logits, logits + vocab);
    FindBlockMaxima(kernels);
  }
  const contract::VocabSum sum = SumVocab(kernels, request.want_entropy);
  result.token.logprob = contract::LogProb(z_[static_cast<size_t>(result.token.id)], sum);
  if (request.want_entropy) result.entropy = contract::Entropy(sum);
  result.top.assign(static_cast<size_t>(request.top_logprobs), {-1, kMinusInfinity});
  if (!result.top.empty()) WriteTop(sum, result.top);
}

bool LogProbsOp::Worker::MakeRow(const RowKernels& kernels, const float* logits, int64_t vocab,
                                 const RowSampling& s) {
  if (!kernels.all_finite(logits, vocab) || !Process(kernels, logits, vocab, s)) return false;
  if (s.temperature > 0.0f && (s.top_k > 0 || s.top_p < 1.0f || s.min_p > 0.0f)) {
    Filter(kernels, s);
  }
  return true;
}

// Applies bias, bans, penalties and temperature. Returns false if the row cannot become a
// distribution.
bool LogProbsOp::Worker::Process(const RowKernels& kernels, const float* logits, int64_t vocab,
                                 const RowSampling& s) {
  z_.assign(logits, logits + vocab);
  for (const TokenBias& b : s.biases) {
    float& z = z_[static_cast<size_t>(b.id)];
    z = contract::Add(z, b.bias);
  }
  for (const int32_t id : s.banned) z_[static_cast<size_t>(id)] = kMinusInfinity;
  for (const TokenCount& c : s.counts) {
    float& z = z_[static_cast<size_t>(c.id)];
    z = contract::Penalise(z, c.in_prompt, c.in_output, s.repetition_penalty, s.presence_penalty,
                           s.frequency_penalty);
  }
  if (!kernels.scale_logits(z_.data(), contract::InverseTemperature(s.temperature), vocab)) {
    return false;
  }
  FindBlockMaxima(kernels);
  return std::any_of(block_max_.begin(), block_max_.end(),
                     [](float max) { return max > kMinusInfinity; });
}

void LogProbsOp::Worker::FindBlockMaxima(const RowKernels& kernels) {
  block_max_.resize(static_cast<size_t>((vocab() + kVocabBlock - 1) / kVocabBlock));
  kernels.block_max(z_.data(), vocab(), block_max_.data());
}

// The last token that top-k and top-p keep of those that min-p kept; none if they keep all.
std::optional<RankedToken> LogProbsOp::Worker::LastKept(const RowKernels& kernels,
                                                        const RowSampling& s, float max) {
  const bool top_k = s.top_k > 0 && s.top_k < vocab();
  const auto token_of = [this](const WeightedToken& token) {
    const int32_t id = IdOf(token.key);
    return RankedToken{z_[static_cast<size_t>(id)], id};
  };
  if (top_k) SelectTop(blocked(), s.top_k, &selection_, &tokens_);
  if (s.top_p >= 1.0f) {
    return top_k ? std::optional<RankedToken>(token_of(tokens_.back())) : std::nullopt;
  }

  const auto weigh = [&] {
    int64_t sum = 0;
    for (WeightedToken& token : tokens_) {
      token.weight = contract::TokenWeight(token_of(token).logit, max);
      sum += token.weight;
    }
    return sum;
  };
  if (top_k) return token_of(NucleusEnd(tokens_, contract::NucleusBound(weigh(), s.top_p)));

  int64_t total = 0;
  kernels.sum_weights(z_.data(), max, vocab(), &total, nullptr);
  const int64_t bound = contract::NucleusBound(total, s.top_p);
  // All tokens above a threshold are a prefix of the order; lower it until they reach the bound.
  for (float depth = 4.0f;; depth *= 2.0f) {
    CollectFrom(blocked(), contract::Sub(max, depth), &tokens_);
    if (weigh() >= bound) return token_of(NucleusEnd(tokens_, bound));
  }
}

void LogProbsOp::Worker::Filter(const RowKernels& kernels, const RowSampling& s) {
  const float max = kernels.max(block_max_.data(), static_cast<int64_t>(block_max_.size()));
  const auto keep = [&](RankedToken last) {
    kernels.keep_prefix(z_.data(), last, vocab());
    FindBlockMaxima(kernels);
  };
  // Min-p keeps the tokens before the first one that fails it. The fp32 function need not be
  // monotone, so this looks for the largest logit that fails, not for a threshold.
  if (s.min_p > 0.0f) keep({kernels.largest_below_min_p(z_.data(), max, s.min_p, vocab()), -1});
  if (const std::optional<RankedToken> last = LastKept(kernels, s, max)) keep(*last);
}

int32_t LogProbsOp::Worker::Draw(const RowKernels& kernels, const RowSampling& s) const {
  const float max = kernels.max(block_max_.data(), static_cast<int64_t>(block_max_.size()));
  const int64_t blocks = static_cast<int64_t>(block_max_.size());
  if (!(s.temperature > 0.0f)) {
    const int64_t block = std::find(block_max_.begin(), block_max_.end(), max) - block_max_.begin();
    const auto begin = z_.begin() + block * kVocabBlock;
    return static_cast<int32_t>(std::find(begin, z_.end(), max) - z_.begin());
  }
  float best = kMinusInfinity;
  int64_t best_id = -1;
  float padded[kVocabBlock];
  float values[kVocabBlock];
  for (int64_t b = 0; b < blocks; ++b) {
    const float block_max = block_max_[static_cast<size_t>(b)];
    if (block_max == kMinusInfinity || contract::Add(block_max, kMaxGumbel) < best) continue;
    const int64_t begin = b * kVocabBlock;
    const int64_t size = std::min(kVocabBlock, vocab() - begin);
    std::copy_n(z_.data() + begin, size, padded);
    std::fill(padded + size, padded + kVocabBlock, kMinusInfinity);
    kernels.add_gumbel(padded, {s.seed, s.sample, s.position}, static_cast<uint32_t>(begin),
                       values);
    const float largest = kernels.max(values, kVocabBlock);
    if (largest > best) {
      best = largest;
      best_id = begin + (std::find(values, values + kVocabBlock, largest) - values);
    }
  }
  return static_cast<int32_t>(best_id);
}

contract::VocabSum LogProbsOp::Worker::SumVocab(const RowKernels& kernels,
                                                bool want_entropy) const {
  const contract::LeafPlan plan = contract::PlanColumns(vocab());
  contract::VocabSum ranges[contract::kLeaves];
  for (size_t l = 0; l < contract::kLeaves; ++l) {
    const float* z = z_.data() + plan.bounds[l];
    const int64_t n = plan.bounds[l + 1] - plan.bounds[l];
    const float max = kernels.max(z, n);
    if (max == kMinusInfinity) continue;
    int64_t weights = 0;
    int64_t distances = 0;
    kernels.sum_weights(z, max, n, &weights, want_entropy ? &distances : nullptr);
    ranges[l] = contract::RangeSum(max, weights, distances);
  }
  return contract::CombineRanges(ranges);
}

void LogProbsOp::Worker::WriteTop(const contract::VocabSum& sum, std::vector<TokenLogProb>& top) {
  SelectTop(blocked(), static_cast<int32_t>(top.size()), &selection_, &tokens_);
  std::sort(tokens_.begin(), tokens_.end(),
            [](const WeightedToken& a, const WeightedToken& b) { return a.key > b.key; });
  for (size_t i = 0; i < std::min(top.size(), tokens_.size()); ++i) {
    const int32_t id = IdOf(tokens_[i].key);
    const float z = z_[static_cast<size_t>(id)];
    if (z > kMinusInfinity) top[i] = {id, contract::LogProb(z, sum)};
  }
}

// The last token, in the order of the filters, whose z is above -inf.
RankedToken LogProbsOp::Worker::LastFinite() const {
  RankedToken last = {-kMinusInfinity, -1};
  for (int32_t id = 0; id < static_cast<int32_t>(z_.size()); ++id) {
    const float z = z_[static_cast<size_t>(id)];
    if (z > kMinusInfinity && z <= last.logit) last = {z, id};
  }
  return last;
}

void LogProbsOp::Worker::Run(const RowKernels& kernels, const TrainingLogProbsArgs& a,
                             int64_t row) {
  LogProbRow& state = a.state[row];
  state = {};
  const RowSampling s = SamplingOf(a.sampling, row);
  if (!MakeRow(kernels, a.logits + row * a.vocab, a.vocab, s)) {
    a.logprobs[row] = kNaN;
    if (a.entropies != nullptr) a.entropies[row] = kNaN;
    return;
  }
  state.finite = 1;
  const contract::VocabSum sum = SumVocab(kernels, true);
  state.sum = {sum.max, sum.sum, sum.weighted_distance};
  if (!kernels.all_finite(z_.data(), a.vocab)) {  // a z is -inf
    const RankedToken last = LastFinite();
    state.last_z = last.logit;
    state.last_id = last.id;
  }
  a.logprobs[row] = contract::LogProb(z_[static_cast<size_t>(a.targets[row])], sum);
  if (a.entropies != nullptr) a.entropies[row] = contract::Entropy(sum);
}

void LogProbsOp::Worker::Run(const RowKernels& kernels, const LogProbGradientArgs& a, int64_t row) {
  const LogProbRow& state = a.state[row];
  Bf16* out = a.dlogits + row * a.vocab;
  if (state.finite == 0) {
    std::fill_n(out, a.vocab, Bf16{0x7fff});
    return;
  }
  const float* logits = a.logits + row * a.vocab;
  z_.assign(logits, logits + a.vocab);
  const float inverse = contract::InverseTemperature(SamplingOf(a.sampling, row).temperature);
  kernels.scale_logits(z_.data(), inverse, a.vocab);
  // {-inf, vocab}: no token comes after it.
  const RankedToken last = state.last_id >= 0
                               ? RankedToken{state.last_z, state.last_id}
                               : RankedToken{kMinusInfinity, static_cast<int32_t>(a.vocab)};
  const float dlogprob = a.dlogprobs[row];
  const float dentropy = a.dentropies != nullptr ? a.dentropies[row] : 0.0f;
  kernels.logit_gradients(z_.data(), state.sum, last, dlogprob, dentropy, inverse, a.vocab, out);
  const int32_t target = a.targets[row];
  const float z = z_[static_cast<size_t>(target)];
  if (!contract::Before(last.logit, last.id, z, target)) {
    out[target] = contract::LogitGradient(z, true, state.sum, dlogprob, dentropy, inverse);
  }
}

LogProbsOp::LogProbsOp(const RowKernels& rows, ThreadPool& pool)
    : rows_(rows), pool_(pool), workers_(static_cast<size_t>(pool.num_threads())) {}

LogProbsOp::~LogProbsOp() = default;

void LogProbsOp::ForEachRow(int64_t rows, RunRow run) {
  pool_.ParallelFor(rows, 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) run(i, workers_[static_cast<size_t>(worker)]);
  });
}

void LogProbsOp::Run(const LogProbsArgs& args) {
  ForEachRow(args.num_rows, [&](int64_t i, Worker& worker) {
    worker.Run(rows_, args.logits + i * args.ld, args.vocab, args.requests[i], args.results[i]);
  });
}

void LogProbsOp::Run(const TrainingLogProbsArgs& args) {
  ForEachRow(args.rows, [&](int64_t i, Worker& worker) { worker.Run(rows_, args, i); });
}

void LogProbsOp::Run(const LogProbGradientArgs& args) {
  ForEachRow(args.rows, [&](int64_t i, Worker& worker) { worker.Run(rows_, args, i); });
}

absl::Status Run(const LogProbsArgs& a, Context& context) {
  context.log_probs.Run(a);
  return absl::OkStatus();
}

absl::Status Run(const TrainingLogProbsArgs& a, Context& context) {
  context.log_probs.Run(a);
  return absl::OkStatus();
}

absl::Status Run(const LogProbGradientArgs& a, Context& context) {
  context.log_probs.Run(a);
  return absl::OkStatus();
}

}  // namespace isobit::cpu
