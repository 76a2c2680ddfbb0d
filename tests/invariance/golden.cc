// The models, the tokens and the digests of what the CPU computes.
#include "tests/invariance/golden.h"

#include <cstdint>
#include <fstream>

#include "common/base/digest.h"
#include "gtest/gtest.h"
#include "kernels/contract/constants.h"
#include "kernels/model/sampling.h"
#include "tests/invariance/tiny_models.h"

namespace isobit::invariance {
namespace {

constexpr int64_t kPromptTokens = 12;

// Every kind of parameter that can move a bit.
SamplingParams AllParameters() {
  SamplingParams params;
  params.temperature = 0.7f;
  params.top_k = 40;
  params.top_p = 0.9f;
  params.min_p = 0.01f;
  params.repetition_penalty = 1.1f;
  params.presence_penalty = 0.3f;
  params.frequency_penalty = 0.2f;
  params.min_tokens = 5;
  params.stop_token_ids = {3, 4};
  params.logit_bias = {{7, 1.5f}, {11, -2.0f}};
  return params;
}

// logits: [vocab], in the backend's memory.
LogProbResult LogProbsOf(Backend& ops, const float* logits, int64_t vocab,
                         const LogProbRequest& request) {
  LogProbResult result;
  EXPECT_TRUE(ops.Run(LogProbsArgs{.logits = logits,
                                   .requests = &request,
                                   .results = &result,
                                   .num_rows = 1,
                                   .vocab = vocab})
                  .ok());
  EXPECT_TRUE(result.finite);
  return result;
}

}  // namespace

std::vector<std::string> GoldenNames() {
  std::vector<std::string> names = TinyModelNames();
  for (const std::string& name : WitnessModelNames()) names.push_back(name);
  names.push_back("smollm2");
  return names;
}

std::string GoldenModelDirectory(const std::string& name) {
  return name == "smollm2" ? SMOLLM2_DIRECTORY : TinyModelDirectory(name);
}

Tokens GoldenTokens(const std::string& name, const ForwardHarness& model) {
  const int64_t count = name == "smollm2" || name == "witness-deep" ? 60
                        : name == "witness-long"                    ? 1700
                                                                    : 600;
  return model.RandomTokens(count, 5);
}

nlohmann::json GoldenDigests(const std::string& name) {
  std::ifstream file(GOLDEN_FILE);
  return nlohmann::json::parse(file).value(name, nlohmann::json());
}

nlohmann::json DigestsOf(const ForwardHarness& model, const Tokens& tokens,
                         const SequenceLogits& logits, Backend& ops) {
  const int64_t vocab = model.config().vocab_size;
  const absl::Span<const int32_t> prompt = absl::MakeConstSpan(tokens).first(kPromptTokens);
  SequenceSampling sampling(AllParameters(), model.config().eos_token_ids, 42, 1, prompt);
  const size_t bytes = logits.size() * sizeof(float);
  const Memory memory = ops.device().Allocate(bytes).value();
  EXPECT_TRUE(ops.device().Copy(memory.get(), logits.data(), bytes).ok());
  std::vector<float> raw;
  std::vector<float> entropies;
  std::vector<float> processed;
  std::vector<int32_t> drawn;
  for (size_t i = kPromptTokens; i < tokens.size(); ++i) {
    const float* const row =
        reinterpret_cast<const float*>(memory.get()) + static_cast<int64_t>(i - 1) * vocab;
    const LogProbResult scored = LogProbsOf(
        ops, row, vocab, {.sampling = {}, .target = tokens[i], .raw = true, .want_entropy = true});
    const LogProbResult draw = LogProbsOf(ops, row, vocab, {.sampling = sampling.NextRow()});
    raw.push_back(scored.token.logprob);
    entropies.push_back(scored.entropy);
    processed.push_back(draw.token.logprob);
    drawn.push_back(draw.token.id);
    sampling.Append(tokens[i]);
  }
  return {{"logits", Sha256Hex(logits.data(), logits.size() * sizeof(float))},
          {"raw_logprobs", Sha256Hex(raw.data(), raw.size() * sizeof(float))},
          {"entropies", Sha256Hex(entropies.data(), entropies.size() * sizeof(float))},
          {"drawn_logprobs", Sha256Hex(processed.data(), processed.size() * sizeof(float))},
          {"drawn_tokens", Sha256Hex(drawn.data(), drawn.size() * sizeof(int32_t))}};
}

nlohmann::json ManyWeightsDigest(Backend& ops) {
  constexpr size_t kRange = 49152;  // the GPU backend takes at most 50,000 tokens in a range
  constexpr size_t kVocab = contract::kLeaves * kRange;
  std::vector<float> values;
  for (size_t variant = 0; variant < 4 * contract::kLeaves; ++variant) {
    const size_t first = variant % contract::kLeaves * kRange;
    std::vector<float> logits(kVocab, -40.0f);
    for (size_t i = first; i < first + kRange; ++i) {
      logits[i] = -12.0f - static_cast<float>((i + 37 * variant) % 1021) * 0x1p-9f;
    }
    logits[first + 77] = 0.0f;
    const Memory memory = ops.device().Allocate(kVocab * sizeof(float)).value();
    EXPECT_TRUE(ops.device().Copy(memory.get(), logits.data(), kVocab * sizeof(float)).ok());
    // Only -log(sum): it shows the last bit of the sum.
    const LogProbResult result =
        LogProbsOf(ops, reinterpret_cast<const float*>(memory.get()), kVocab,
                   {.sampling = {},
                    .target = static_cast<int32_t>(first) + 77,
                    .raw = true,
                    .want_entropy = true});
    values.insert(values.end(), {result.token.logprob, result.entropy});
  }
  return {{"logprobs_and_entropies", Sha256Hex(values.data(), values.size() * sizeof(float))}};
}

}  // namespace isobit::invariance
