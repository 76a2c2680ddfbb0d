// Compares order and meaning of the sampling parameters with vLLM's, by references in the
// repository (make_vllm_references.py): exactly which tokens can be drawn, and how likely each is.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/model/sampling.h"
#include "kernels/oracle/oracle_backend.h"
#include "nlohmann/json.hpp"

namespace isobit {
namespace {

constexpr float kLogitScale = 64.0f;
// Bound on the fp32 error of a logprob of such logits.
constexpr double kTolerance = 1e-5;

SamplingParams ParamsOf(const nlohmann::json& json) {
  SamplingParams params;
  params.temperature = json.value("temperature", params.temperature);
  params.top_k = json.value("top_k", params.top_k);
  params.top_p = json.value("top_p", params.top_p);
  params.min_p = json.value("min_p", params.min_p);
  params.repetition_penalty = json.value("repetition_penalty", params.repetition_penalty);
  params.frequency_penalty = json.value("frequency_penalty", params.frequency_penalty);
  params.presence_penalty = json.value("presence_penalty", params.presence_penalty);
  params.min_tokens = json.value("min_tokens", params.min_tokens);
  params.ignore_eos = json.value("ignore_eos", params.ignore_eos);
  params.stop_token_ids = json.value("stop_token_ids", params.stop_token_ids);
  const nlohmann::json biases = json.value("logit_bias", nlohmann::json::object());
  for (const auto& [id, bias] : biases.items()) {
    params.logit_bias.emplace_back(std::stoi(id), bias.get<float>());
  }
  return params;
}

// The row that follows the case's output.
class Row {
 public:
  explicit Row(const nlohmann::json& json)
      : sampling_(ParamsOf(json["parameters"]), json["eos_token_ids"].get<std::vector<int32_t>>(),
                  1, 0, json["prompt"].get<std::vector<int32_t>>()) {
    for (const int32_t token : json["output"].get<std::vector<int32_t>>()) sampling_.Append(token);
    for (const float logit : json["logits"].get<std::vector<float>>()) {
      logits_.push_back(logit / kLogitScale);
    }
  }

  size_t vocab() const { return logits_.size(); }
  // Scores `target`; -1: draws.
  TokenLogProb Run(Backend& ops, int32_t target) const {
    const LogProbRequest request = {.sampling = sampling_.NextRow(), .target = target};
    LogProbResult result;
    EXPECT_TRUE(ops.Run(LogProbsArgs{.logits = logits_.data(),
                                     .requests = &request,
                                     .results = &result,
                                     .num_rows = 1,
                                     .vocab = static_cast<int64_t>(vocab())})
                    .ok());
    EXPECT_TRUE(result.finite);
    return result.token;
  }

 private:
  SequenceSampling sampling_;
  std::vector<float> logits_;
};

// Prints every case that does not agree; returns their number.
int Disagreements(Backend& ops) {
  std::ifstream file(std::string(REFERENCES_DIRECTORY) + "/vllm_sampling.json");
  const nlohmann::json references = nlohmann::json::parse(file);
  EXPECT_GE(references["cases"].size(), 100u);
  int disagreements = 0;
  for (const nlohmann::json& json : references["cases"]) {
    const Row row(json);
    std::vector<int32_t> kept;
    std::vector<double> logprobs;
    for (int32_t id = 0; id < static_cast<int32_t>(row.vocab()); ++id) {
      const float logprob = row.Run(ops, id).logprob;
      if (logprob == -std::numeric_limits<float>::infinity()) continue;
      kept.push_back(id);
      logprobs.push_back(logprob);
    }
    const auto expected = json["logprobs"].get<std::vector<double>>();
    double error = 0.0;
    for (size_t i = 0; i < std::min(expected.size(), logprobs.size()); ++i) {
      error = std::max(error, std::abs(logprobs[i] - expected[i]));
    }
    const bool greedy = json["parameters"]["temperature"] == 0.0;
    const int32_t drawn = row.Run(ops, -1).id;
    const bool agrees = nlohmann::json(kept) == json["kept"] && error < kTolerance &&
                        (!greedy || drawn == json["greedy"]);
    if (agrees) continue;
    ++disagreements;
    ADD_FAILURE() << json["parameters"] << "\n  kept " << nlohmann::json(kept) << ", vLLM "
                  << json["kept"] << "\n  largest difference of logprobs " << error << ", drew "
                  << drawn << ", vLLM's greedy token " << json["greedy"];
  }
  return disagreements;
}

TEST(VllmSamplingTest, TheOracleKeepsWhatVllmKeeps) {
  EXPECT_EQ(Disagreements(*MakeOracleBackend()), 0);
}

TEST(VllmSamplingTest, TheCpuKeepsWhatVllmKeeps) {
  EXPECT_EQ(Disagreements(*MakeCpuBackend({.num_threads = 1})), 0);
}

}  // namespace
}  // namespace isobit
