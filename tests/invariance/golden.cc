// See golden.h.
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
                         const SequenceLogits& logits, Ops& ops) {
  const int64_t vocab = model.config().vocab_size;
  const absl::Span<const int32_t> prompt = absl::MakeConstSpan(tokens).first(kPromptTokens);
  SequenceSampling sampling(AllParameters(), model.config().eos_token_ids, 42, 1, prompt);
  const size_t bytes = logits.size() * sizeof(float);
  const Memory memory = ops.Allocate(bytes).value();
  EXPECT_TRUE(ops.Copy(memory.get(), logits.data(), bytes).ok());
  std::vector<float> raw;
  std::vector<float> entropies;
  std::vector<float> processed;
  std::vector<int32_t> drawn;
  for (size_t i = kPromptTokens; i < tokens.size(); ++i) {
    LogProbRow row;
    row.logits = reinterpret_cast<const float*>(memory.get()) + static_cast<int64_t>(i - 1) * vocab;
    row.target = tokens[i];
    row.raw = true;
    row.want_entropy = true;
    LogProbRow draw;
    draw.logits = row.logits;
    draw.sampling = sampling.NextRow();
    EXPECT_TRUE(ops.LogProbs({.rows = &row, .num_rows = 1, .vocab = vocab}).ok());
    EXPECT_TRUE(ops.LogProbs({.rows = &draw, .num_rows = 1, .vocab = vocab}).ok());
    EXPECT_TRUE(row.finite && draw.finite);
    raw.push_back(row.token.logprob);
    entropies.push_back(row.entropy);
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

nlohmann::json ManyWeightsDigest(Ops& ops) {
  constexpr size_t kRange = 49152;  // the GPU's vocabularies end at 50,000 tokens a range
  constexpr size_t kVocab = contract::kLeaves * kRange;
  std::vector<float> values;
  for (size_t variant = 0; variant < 4 * contract::kLeaves; ++variant) {
    const size_t first = variant % contract::kLeaves * kRange;
    std::vector<float> logits(kVocab, -40.0f);
    for (size_t i = first; i < first + kRange; ++i) {
      logits[i] = -12.0f - static_cast<float>((i + 37 * variant) % 1021) * 0x1p-9f;
    }
    logits[first + 77] = 0.0f;
    const Memory memory = ops.Allocate(kVocab * sizeof(float)).value();
    EXPECT_TRUE(ops.Copy(memory.get(), logits.data(), kVocab * sizeof(float)).ok());
    LogProbRow row;
    row.logits = reinterpret_cast<const float*>(memory.get());
    row.target = static_cast<int32_t>(first) + 77;  // -log(sum) alone: it shows the sum's last bit
    row.raw = true;
    row.want_entropy = true;
    EXPECT_TRUE(ops.LogProbs({.rows = &row, .num_rows = 1, .vocab = kVocab}).ok());
    values.insert(values.end(), {row.token.logprob, row.entropy});
  }
  return {{"logprobs_and_entropies", Sha256Hex(values.data(), values.size() * sizeof(float))}};
}

}  // namespace isobit::invariance
