// Accuracy against Hugging Face transformers: our logprobs may differ from its fp32 run at most as
// much as its own bf16 run does.
//
// make_references.py has made the references, which are in the repository; this test needs no
// torch. SmolLM2 is reported as skipped if python -m isobit.convert.smollm2 has not made its
// directory.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/base/digest.h"
#include "gtest/gtest.h"
#include "kernels/contract/log_prob.h"
#include "kernels/cpu/cpu_backend.h"
#include "nlohmann/json.hpp"
#include "tests/invariance/forward_harness.h"
#include "tests/invariance/tiny_models.h"

namespace isobit::invariance {
namespace {

// SHA-256 over the *.safetensors files of a directory in name order, as make_references.py computes
// it.
std::string WeightsDigest(const std::string& directory) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  Sha256 digest;
  std::vector<char> chunk(1 << 20);
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    while (file.read(chunk.data(), static_cast<std::streamsize>(chunk.size())), file.gcount() > 0) {
      digest.Update(chunk.data(), static_cast<size_t>(file.gcount()));
    }
  }
  return digest.HexFinish();
}

Tokens Join(const nlohmann::json& first, const nlohmann::json& second) {
  auto tokens = first.get<Tokens>();
  const auto rest = second.get<Tokens>();
  tokens.insert(tokens.end(), rest.begin(), rest.end());
  return tokens;
}

// The raw logprob of `token` under one row of logits.
double LogProbOf(const float* logits, int64_t vocab, int32_t token) {
  const LogProbRequest request = {.sampling = {}, .target = token, .raw = true};
  LogProbResult result;
  EXPECT_TRUE(MakeCpuBackend({})
                  ->Run(LogProbsArgs{.logits = logits,
                                     .requests = &request,
                                     .results = &result,
                                     .num_rows = 1,
                                     .vocab = vocab})
                  .ok());
  EXPECT_TRUE(result.finite);
  return result.token.logprob;
}

class AccuracyTest : public testing::TestWithParam<std::string> {};

TEST_P(AccuracyTest, ErrorIsNoLargerThanTransformersBf16) {
  const std::string name = GetParam();
  const bool tiny = name.starts_with("tiny");
  const std::string directory = tiny ? TinyModelDirectory(name) : std::string(SMOLLM2_DIRECTORY);
  if (!std::filesystem::exists(directory + "/config.json")) {
    GTEST_SKIP() << directory << " is not there: python -m isobit.convert.smollm2 makes it";
  }
  std::ifstream file(std::string(REFERENCES_DIRECTORY) + "/" + name + ".json");
  ASSERT_TRUE(file.is_open());
  const nlohmann::json reference = nlohmann::json::parse(file);
  ASSERT_EQ(WeightsDigest(directory), reference["weights_sha256"].get<std::string>())
      << "these are not the weights of the references";

  const ForwardHarness model(directory);
  Schedule schedule;
  schedule.make_ops = [] { return MakeCpuBackend({.num_threads = 2}); };
  const int64_t vocab = model.config().vocab_size;
  double max = 0;
  double sum = 0;
  double squares = 0;
  int64_t count = 0;
  std::vector<Tokens> sequences;
  for (const auto& sequence : reference["sequences"]) {
    sequences.push_back(Join(sequence["prompt"], sequence["completion"]));
  }
  const std::vector<SequenceLogits> all_logits = model.Run(sequences, schedule);
  for (size_t s = 0; s < sequences.size(); ++s) {
    const Tokens& tokens = sequences[s];
    const SequenceLogits& logits = all_logits[s];
    const auto& sequence = reference["sequences"][s];
    const size_t prompt = sequence["prompt"].size();
    for (size_t i = 0; i < sequence["completion"].size(); ++i) {
      const float* row = logits.data() + static_cast<int64_t>(prompt + i - 1) * vocab;
      const double error = std::abs(LogProbOf(row, vocab, tokens[prompt + i]) -
                                    sequence["logprobs"][i].get<double>());
      max = std::max(max, error);
      sum += error;
      squares += error * error;
      ++count;
    }
  }
  const auto& bound = reference["bf16_error"];
  const double mean = sum / static_cast<double>(count);
  const double rms = std::sqrt(squares / static_cast<double>(count));
  std::printf(
      "%s, %lld tokens: |error| max %.4g mean %.4g rms %.4g; transformers bf16: %.4g %.4g %.4g\n",
      name.c_str(), static_cast<long long>(count), max, mean, rms, bound["max"].get<double>(),
      bound["mean"].get<double>(), bound["rms"].get<double>());
  EXPECT_EQ(count, bound["tokens"].get<int64_t>());
  EXPECT_LE(mean, bound["mean"].get<double>());
  EXPECT_LE(rms, bound["rms"].get<double>());
}

// Reports how many greedy continuations agree. transformers' own bf16 and fp32 runs differ on some,
// so only the first token must be equal.
TEST(GreedyTest, GreedyContinuationsOfSmolLm2) {
  const std::string directory = SMOLLM2_DIRECTORY;
  if (!std::filesystem::exists(directory + "/config.json")) {
    GTEST_SKIP() << directory << " is not there: python -m isobit.convert.smollm2 makes it";
  }
  std::ifstream file(std::string(REFERENCES_DIRECTORY) + "/smollm2.json");
  const nlohmann::json reference = nlohmann::json::parse(file);
  const ForwardHarness model(directory);
  Schedule schedule;
  schedule.make_ops = [] { return MakeCpuBackend({.num_threads = 2}); };
  const auto vocab = static_cast<size_t>(model.config().vocab_size);
  std::vector<Tokens> sequences;
  for (const auto& greedy : reference["greedy"]) {
    sequences.push_back(Join(greedy["prompt"], greedy["bf16"]));
    sequences.push_back(Join(greedy["prompt"], greedy["fp32"]));
  }
  const std::vector<SequenceLogits> logits = model.Run(sequences, schedule);
  // How many tokens after the prompt of sequence s greedy decoding reproduces.
  const auto agreement = [&](size_t s, size_t prompt) {
    const Tokens& tokens = sequences[s];
    size_t i = prompt;
    for (; i < tokens.size(); ++i) {
      const float* row = logits[s].data() + (i - 1) * vocab;
      if (std::max_element(row, row + vocab) - row != tokens[i]) break;
    }
    return i - prompt;
  };
  int equal_bf16 = 0;
  int equal_fp32 = 0;
  for (size_t i = 0; i < reference["greedy"].size(); ++i) {
    const auto& greedy = reference["greedy"][i];
    const size_t bf16 = agreement(2 * i, greedy["prompt"].size());
    const size_t fp32 = agreement(2 * i + 1, greedy["prompt"].size());
    EXPECT_GE(std::max(bf16, fp32), 1u) << greedy["text"];
    equal_bf16 += bf16 == greedy["bf16"].size() ? 1 : 0;
    equal_fp32 += fp32 == greedy["fp32"].size() ? 1 : 0;
    std::printf("agrees with bf16 on %zu of %zu tokens, with fp32 on %zu of %zu: %s\n", bf16,
                greedy["bf16"].size(), fp32, greedy["fp32"].size(),
                greedy["text"].get<std::string>().c_str());
  }
  std::printf("whole continuations equal: bf16 %d, fp32 %d of %zu\n", equal_bf16, equal_fp32,
              reference["greedy"].size());
}

INSTANTIATE_TEST_SUITE_P(Models, AccuracyTest,
                         testing::Values("tiny-qwen3", "tiny-qwen2", "tiny-llama", "tiny-mistral",
                                         "tiny-yarn", "tiny-windows", "smollm2"),
                         [](const testing::TestParamInfo<std::string>& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace isobit::invariance
