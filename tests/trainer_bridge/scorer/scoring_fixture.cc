// The collector, random inputs, and scores by the oracle.
#include "tests/trainer_bridge/scorer/scoring_fixture.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>
#include <random>
#include <utility>

#include "common/base/check.h"
#include "common/checkpoint/checkpoint.h"
#include "gtest/gtest.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/model/numerics.h"
#include "kernels/model/resident_weights.h"
#include "kernels/model/sampling.h"
#include "kernels/model/transformer.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/support/prepare_blocks.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

constexpr std::chrono::minutes kPatience(1);

template <class T>
T Must(absl::StatusOr<T> value) {
  ISOBIT_CHECK(value.ok()) << value.status().ToString();
  return *std::move(value);
}

void Must(const absl::Status& status) { ISOBIT_CHECK(status.ok()) << status.ToString(); }

}  // namespace

void Collector::OnScore(SequenceScore score) {
  const std::lock_guard lock(mutex_);
  const size_t index = score.index;
  ISOBIT_CHECK(!status_.has_value()) << "a score after the end";
  ISOBIT_CHECK(scores_.emplace(index, std::move(score)).second) << "twice " << index;
  changed_.notify_all();
}

void Collector::OnDone(const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  ISOBIT_CHECK(!status_.has_value()) << "a second end";
  status_ = status;
  changed_.notify_all();
}

bool Collector::CanTakeMore() const {
  const std::lock_guard lock(mutex_);
  return can_take_more_;
}

void Collector::SetCanTakeMore(bool can_take_more) {
  const std::lock_guard lock(mutex_);
  can_take_more_ = can_take_more;
}

absl::Status Collector::WaitUntilDone() {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, kPatience, [&] { return status_.has_value(); })) {
    return absl::DeadlineExceededError("the job did not end");
  }
  return *status_;
}

bool Collector::WaitForScores(size_t count) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kPatience, [&] { return scores_.size() >= count; });
}

bool Collector::done() const {
  const std::lock_guard lock(mutex_);
  return status_.has_value();
}

std::map<size_t, SequenceScore> Collector::scores() const {
  const std::lock_guard lock(mutex_);
  return scores_;
}

Submitted MakeJob(std::vector<ScoreInput> inputs, ScoreOptions options) {
  auto collector = std::make_shared<Collector>();
  return {std::make_shared<ScoreJob>(std::move(inputs), std::move(options), collector), collector};
}

std::vector<ScoreInput> RandomInputs(const ModelConfig& config, uint64_t seed, size_t count,
                                     size_t max_tokens) {
  std::mt19937_64 random(seed);
  const auto id = [&] { return static_cast<int32_t>(random() % config.vocab_size); };
  std::vector<ScoreInput> inputs(count);
  for (ScoreInput& input : inputs) {
    const size_t tokens = 2 + random() % (max_tokens - 1);
    const size_t prompt = 1 + random() % (tokens - 1);
    for (size_t i = 0; i < tokens; ++i) {
      (i < prompt ? input.prompt : input.completion).push_back(id());
    }
  }
  return inputs;
}

std::vector<ScoreInput> AlikeInputs(const ModelConfig& config, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto some = [&](size_t count) {
    std::vector<int32_t> ids(count);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % config.vocab_size);
    return ids;
  };
  const std::vector<int32_t> prompt = some(70);
  const auto head = [&](int64_t count) {
    return std::vector<int32_t>(prompt.begin(), prompt.begin() + count);
  };
  std::vector<ScoreInput> inputs;
  for (const size_t length : {1, 9, 10, 11, 30, 0}) inputs.push_back({prompt, some(length)});
  inputs.push_back(inputs[1]);             // twice the same
  inputs.push_back({head(64), {}});        // only full pages
  inputs.push_back({head(64), {}});        // twice
  inputs.push_back({head(32), some(20)});  // a prompt that begins another
  inputs.push_back({head(33), some(20)});
  inputs.push_back({head(15), some(3)});  // alike for less than a page
  inputs.push_back({head(1), {}});        // one token
  inputs.push_back({head(1), some(40)});
  inputs.push_back({head(20), {}});  // the same tokens, of which fewer are the prompt
  inputs.back().completion.assign(prompt.begin() + 20, prompt.end());
  ScoreInput longer = inputs[4];  // goes on where another ends
  for (const int32_t id : some(25)) longer.completion.push_back(id);
  inputs.push_back(std::move(longer));
  ScoreInput other = inputs[4];  // differs in the last token of a page
  other.prompt[47] = static_cast<int32_t>((other.prompt[47] + 1) % config.vocab_size);
  inputs.push_back(std::move(other));
  inputs.push_back({some(40), some(10)});  // a stranger
  return inputs;
}

ScoreOptions FullOptions() {
  ScoreOptions options;
  options.sampling.temperature = 0.7f;
  options.sampling.top_p = 0.97f;
  options.sampling.top_k = 60;
  options.sampling.min_p = 0.001f;
  options.sampling.min_tokens = 4;
  options.sampling.stop_token_ids = {3, 11, 12};
  options.sampling.repetition_penalty = 1.2f;
  options.sampling.presence_penalty = 0.3f;
  options.sampling.frequency_penalty = -0.2f;
  options.sampling.logit_bias = {{5, 2.5f}, {8, -1.0f}};
  options.sampling.logprobs = 5;
  options.prompt_logprobs = true;
  options.entropy = true;
  return options;
}

std::vector<uint32_t> Bits(const SequenceScore& score) {
  std::vector<uint32_t> bits = {static_cast<uint32_t>(score.version.id)};
  for (const TokenScores* scores : {&score.completion, &score.prompt}) {
    bits.push_back(static_cast<uint32_t>(scores->logprobs.size()));
    for (const float x : scores->logprobs) bits.push_back(std::bit_cast<uint32_t>(x));
    for (const float x : scores->entropies) bits.push_back(std::bit_cast<uint32_t>(x));
    for (const TokenLogProb& top : scores->top) {
      bits.push_back(static_cast<uint32_t>(top.id));
      bits.push_back(std::bit_cast<uint32_t>(top.logprob));
    }
  }
  return bits;
}

AllBits ScoreAll(Scorer& scorer, const std::vector<ScoreInput>& inputs,
                 const ScoreOptions& options) {
  const Submitted submitted = MakeJob(inputs, options);
  ISOBIT_EXPECT_OK(scorer.Submit(submitted.job));
  ISOBIT_EXPECT_OK(submitted.collector->WaitUntilDone());
  AllBits bits;
  for (const auto& [index, score] : submitted.collector->scores()) bits.push_back(Bits(score));
  EXPECT_EQ(bits.size(), inputs.size());
  return bits;
}

AllBits WithoutVersions(AllBits bits) {
  for (std::vector<uint32_t>& sequence : bits) sequence.erase(sequence.begin());
  return bits;
}

SequenceScore ScoreByDefinition(const std::string& model_directory, const ScoreInput& input,
                                const ScoreOptions& options) {
  const std::unique_ptr<Backend> ops = MakeOracleBackend();
  const ModelConfig config = Must(LoadModelConfig(model_directory));
  const Checkpoint checkpoint = Must(Checkpoint::Open(model_directory));
  const WeightLayout layout(config, Must(ShapeOfRank(config, 0, 1)), ops->packer());
  const auto weights = Must(ResidentWeights::Create(layout, ops->device()));
  Must(weights->Commit(
      Must(testing_support::PrepareBlocks(checkpoint, "", {weights.get()})).ranks.blocks.front()));
  const contract::RopeTable rope = RopeTableOf(config, config.max_position_embeddings);
  Transformer transformer(layout, rope, *ops, /*all_reduce=*/nullptr);

  Batch batch;
  batch.ids = input.prompt;
  batch.ids.insert(batch.ids.end(), input.completion.begin(), input.completion.end());
  const auto rows = static_cast<int64_t>(batch.ids.size());
  std::vector<int32_t> pages(static_cast<size_t>(rows));
  std::iota(pages.begin(), pages.end(), 0);
  batch.sequences = {{.first_row = 0, .num_rows = rows, .pages = pages.data()}};
  const KvCache cache = Must(
      KvCache::Create(config, layout.shape(),
                      {.num_pages = static_cast<int32_t>(rows), .page_size = 1}, ops->device()));
  std::vector<Bf16> hidden(static_cast<size_t>(rows) * static_cast<size_t>(config.hidden_size));
  Must(transformer.Forward(batch, *weights, cache, hidden.data()));

  SequenceScore score;
  score.version.id = 1;
  SequenceSampling sampling(options.sampling, config.eos_token_ids, 0, 0, input.prompt);
  const size_t first = options.prompt_logprobs ? 1 : input.prompt.size();
  std::vector<float> logits(static_cast<size_t>(config.vocab_size));
  for (size_t position = first; position < batch.ids.size(); ++position) {
    const bool in_prompt = position < input.prompt.size();
    Must(
        transformer.Logits(hidden.data() + (position - 1) * static_cast<size_t>(config.hidden_size),
                           1, *weights, logits.data(), config.vocab_size));
    LogProbRequest request;
    request.target = batch.ids[position];
    request.raw = in_prompt || options.raw;
    request.top_logprobs = static_cast<int32_t>(options.sampling.logprobs);
    request.want_entropy = options.entropy && !in_prompt;
    if (!in_prompt) request.sampling = sampling.NextRow();
    LogProbResult result;
    Must(ops->Run(LogProbsArgs{.logits = logits.data(),
                               .requests = &request,
                               .results = &result,
                               .num_rows = 1,
                               .vocab = config.vocab_size}));
    ISOBIT_CHECK(result.finite);
    if (!in_prompt) sampling.Append(request.target);
    TokenScores& scores = in_prompt ? score.prompt : score.completion;
    scores.logprobs.push_back(result.token.logprob);
    if (request.want_entropy) scores.entropies.push_back(result.entropy);
    scores.top.insert(scores.top.end(), result.top.begin(), result.top.end());
  }
  return score;
}

}  // namespace isobit
