// Golden bits: digests of logits, logprobs and draws for fixed models and tokens, computed on a
// CPU. Every later kernel, on any device, is held to them; a change of golden.json is a new
// contract version.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/base/digest.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/model/sampling.h"
#include "nlohmann/json.hpp"
#include "tests/invariance/forward_harness.h"
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

// Teacher-forced over tokens[kPromptTokens..]: raw logprobs of the tokens, processed logprobs and
// ids of what would be drawn.
nlohmann::json DigestsOf(const ForwardHarness& model, const Tokens& tokens,
                         const SequenceLogits& logits) {
  const int64_t vocab = model.config().vocab_size;
  const absl::Span<const int32_t> prompt = absl::MakeConstSpan(tokens).first(kPromptTokens);
  SequenceSampling sampling(AllParameters(), model.config().eos_token_ids, 42, 1, prompt);
  const auto ops = MakeCpuOps({});
  std::vector<float> raw;
  std::vector<float> processed;
  std::vector<int32_t> drawn;
  for (size_t i = kPromptTokens; i < tokens.size(); ++i) {
    LogProbRow row;
    row.logits = logits.data() + static_cast<int64_t>(i - 1) * vocab;
    row.target = tokens[i];
    row.raw = true;
    LogProbRow draw;
    draw.logits = row.logits;
    draw.sampling = sampling.NextRow();
    EXPECT_TRUE(ops->LogProbs({.rows = &row, .num_rows = 1, .vocab = vocab}).ok());
    EXPECT_TRUE(ops->LogProbs({.rows = &draw, .num_rows = 1, .vocab = vocab}).ok());
    EXPECT_TRUE(row.finite && draw.finite);
    raw.push_back(row.token.logprob);
    processed.push_back(draw.token.logprob);
    drawn.push_back(draw.token.id);
    sampling.Append(tokens[i]);
  }
  return {{"logits", Sha256Hex(logits.data(), logits.size() * sizeof(float))},
          {"raw_logprobs", Sha256Hex(raw.data(), raw.size() * sizeof(float))},
          {"drawn_logprobs", Sha256Hex(processed.data(), processed.size() * sizeof(float))},
          {"drawn_tokens", Sha256Hex(drawn.data(), drawn.size() * sizeof(int32_t))}};
}

class GoldenTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, DigestsHold) {
  const std::string name = GetParam();
  const std::string directory =
      name == "smollm2" ? std::string(SMOLLM2_DIRECTORY) : TinyModelDirectory(name);
  if (!std::filesystem::exists(directory + "/config.json")) {
    GTEST_SKIP() << directory << " is not there: python -m isobit.smollm2 makes it";
  }
  const ForwardHarness model(directory);
  // Long enough for the second split of attention (512 positions) in the tiny models.
  const Tokens tokens = model.RandomTokens(name == "smollm2" ? 60 : 600, 5);
  Schedule schedule;
  schedule.make_ops = [] { return MakeCpuOps({.num_threads = 2}); };
  const nlohmann::json actual = DigestsOf(model, tokens, model.Run({tokens}, schedule)[0]);
  std::ifstream file(GOLDEN_FILE);
  const nlohmann::json golden = nlohmann::json::parse(file);
  EXPECT_EQ(actual, golden.value(name, nlohmann::json()))
      << "\"" << name << "\": " << actual.dump(2);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest,
                         testing::Values("tiny-qwen3", "tiny-qwen2", "tiny-llama", "tiny-mistral",
                                         "smollm2"),
                         [](const testing::TestParamInfo<std::string>& info) {
                           std::string name = info.param;
                           for (char& c : name) {
                             if (c == '-') c = '_';
                           }
                           return name;
                         });

}  // namespace
}  // namespace isobit::invariance
