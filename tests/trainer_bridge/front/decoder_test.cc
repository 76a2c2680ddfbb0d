// The C++ front against Python: the same model, batches and losses give the same bits of logprobs,
// gradients, norms, and parameters and moments after some steps.
#include "trainer_bridge/front/decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/checkpoint.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/front/same_bits.h"
#include "trainer_bridge/front/ops.h"
#include "trainer_bridge/front/optimizer.h"

namespace isobit::front {
namespace {

using testing_support::IsOk;
using testing_support::TempDir;
using testing_support::TinyConfig;

constexpr int kSteps = 5;  // each with another loss
constexpr double kLearningRate = 3e-3;
constexpr double kMaxNorm = 0.5;
constexpr int64_t kPackTokens = 45;
constexpr int64_t kLanes = 2;

// A batch of several slots, and an advantage of each scored token.
struct Case {
  std::vector<TrainingSequence> sequences;
  std::vector<std::vector<float>> advantages;
};

Case MakeCase(const ModelConfig& config, uint64_t seed) {
  std::mt19937_64 random(seed);
  Case c;
  for (int i = 0; i < 9; ++i) {
    TrainingSequence& s = c.sequences.emplace_back();
    const size_t length = 2 + random() % 40;
    for (size_t t = 0; t < length; ++t) {
      s.ids.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(config.vocab_size)));
    }
    s.prompt_length = 1 + static_cast<int64_t>(random() % (length - 1));
    if (i % 2 == 1) s.temperature = 0.75f;
    if (i % 3 == 1) s.top_k = 40;
    if (i % 4 == 2) s.top_p = 0.96875f;
    if (i % 5 == 3) s.min_p = 0.0078125f;
    std::vector<float>& advantages = c.advantages.emplace_back();
    for (auto t = static_cast<size_t>(s.prompt_length); t < length; ++t) {
      advantages.push_back(static_cast<float>(random() % 1000) / 500.0f - 1.0f);
    }
  }
  return c;
}

void WriteCase(const Case& c, const std::string& path) {
  nlohmann::json json = {{"advantages", c.advantages}, {"steps", kSteps},
                         {"lr", kLearningRate},        {"max_norm", kMaxNorm},
                         {"pack_tokens", kPackTokens}, {"lanes", kLanes}};
  for (const TrainingSequence& s : c.sequences) {
    json["sequences"].push_back(s.ids);
    json["prompt_lengths"].push_back(s.prompt_length);
    json["temperature"].push_back(s.temperature);
    json["top_k"].push_back(s.top_k);
    json["top_p"].push_back(s.top_p);
    json["min_p"].push_back(s.min_p);
  }
  std::ofstream(path) << json;
}

// python_gradients.py has the same.
torch::Tensor LossOf(int step, const Scores& scores, const torch::Tensor& advantages) {
  // A token that the filters exclude has a logprob of -inf, and no loss.
  const torch::Tensor weights =
      torch::isfinite(scores.logprobs.detach()).to(torch::kFloat32) / 64.0f;
  const torch::Tensor logprobs =
      torch::where(weights > 0, scores.logprobs, torch::zeros_like(weights));
  const torch::Tensor fixed = logprobs.detach();
  PolicyLossOptions options;
  if (step == 1 || step == 2) options.old_logprobs = fixed - advantages * 0.3;
  if (step == 2) {
    options.reference_logprobs = fixed + advantages * 0.2;
    options.kl = 0.1;
    options.clip_high = 0.25;
  }
  if (step == 3) return PolicyLoss(logprobs, torch::ones_like(advantages), weights);
  const torch::Tensor entropy = (scores.entropies * weights).sum();
  if (step == 4) return entropy * -0.25;
  const torch::Tensor loss = PolicyLoss(logprobs, advantages, weights, options);
  return step == 0 ? loss + entropy * 0.25 : loss;
}

// What was computed, by the names that python_gradients.py uses.
using Results = std::vector<std::pair<std::string, torch::Tensor>>;

// The backward passes of a step's slots.
void Backward(Decoder& decoder, const Case& c, int step, int64_t pack_tokens, Results* results) {
  std::vector<int64_t> lengths;
  for (const auto& s : c.sequences) lengths.push_back(static_cast<int64_t>(s.ids.size()));
  const auto slots = CutIntoSlots(lengths, pack_tokens, kLanes);
  ASSERT_THAT(slots, IsOk());
  size_t first = 0;
  for (size_t slot = 0; slot < slots->size(); ++slot) {
    const std::vector<int64_t>& packs = (*slots)[slot];
    const auto count = static_cast<size_t>(std::accumulate(packs.begin(), packs.end(), int64_t{0}));
    const auto batch = MakeBatch(absl::MakeSpan(c.sequences).subspan(first, count), packs);
    ASSERT_THAT(batch, IsOk());
    std::vector<float> advantages;
    for (size_t i = first; i < first + count; ++i) {
      advantages.insert(advantages.end(), c.advantages[i].begin(), c.advantages[i].end());
    }
    first += count;
    const auto scores = decoder.Score(*batch);
    ASSERT_THAT(scores, IsOk());
    LossOf(step, *scores, torch::tensor(advantages)).backward();
    results->emplace_back(absl::StrCat("logprobs.", step, ".", slot), scores->logprobs.detach());
    results->emplace_back(absl::StrCat("entropies.", step, ".", slot), scores->entropies.detach());
  }
}

void AddGradients(const Decoder& decoder, int step, Results* results) {
  for (const auto& item : decoder.named_parameters()) {
    results->emplace_back(absl::StrCat("gradient.", step, ".", item.key()),
                          item.value().grad().clone());
  }
}

Results Train(Decoder& decoder, const Case& c) {
  Results results;
  const NamedParameters parameters = ParametersOf(decoder);
  auto optimizer = AdamW::Create(parameters, {.lr = kLearningRate});
  EXPECT_THAT(optimizer, IsOk());
  for (int step = 0; step < kSteps; ++step) {
    Backward(decoder, c, step, kPackTokens, &results);
    AddGradients(decoder, step, &results);
    const auto norm = ClipGradNorm(parameters, kMaxNorm);
    EXPECT_THAT(norm, IsOk());
    results.emplace_back(absl::StrCat("norm.", step),
                         torch::tensor({*norm}, torch::kFloat64).view(torch::kFloat32));
    EXPECT_THAT(optimizer->Step(), IsOk());
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    const AdamW::State& state = optimizer->state()[i];
    results.emplace_back("parameter." + name, parameter.detach());
    results.emplace_back("master." + name, state.master);
    results.emplace_back("m." + name, state.m);
    results.emplace_back("v." + name, state.v);
  }
  return results;
}

torch::Tensor Stored(const Checkpoint& checkpoint, const std::string& name) {
  const isobit::Tensor* tensor = checkpoint.Find(name);
  if (tensor == nullptr) return {};
  torch::Tensor out = torch::empty(
      tensor->shape, tensor->dtype == DType::kBf16 ? torch::kBFloat16 : torch::kFloat32);
  const auto index = static_cast<size_t>(tensor - checkpoint.tensors().data());
  EXPECT_TRUE(checkpoint.Read(index, 0, out.nbytes(), static_cast<uint8_t*>(out.data_ptr())).ok());
  return out;
}

std::vector<std::string> Unequal(const Results& results, const Checkpoint& python) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : results) {
    if (!SameBits(tensor, Stored(python, name))) names.push_back(name);
  }
  return names;
}

struct Model {
  const char* name;
  Architecture architecture;
  bool tied;
  bool biases = false;
};

class DecoderTest : public testing::TestWithParam<Model> {
 protected:
  DecoderTest() : config_(TinyConfig(GetParam().architecture)) {
    config_.tie_word_embeddings = GetParam().tied;
    if (GetParam().biases) config_.qkv_bias = config_.o_bias = config_.mlp_bias = true;
    testing_support::WriteTinyModel(config_, 11, dir_.File("model"));
  }

  std::shared_ptr<Decoder> Load(const std::string& name) {
    auto decoder = Decoder::Load(dir_.File(name));
    EXPECT_THAT(decoder, IsOk());
    return *std::move(decoder);
  }

  TempDir dir_;
  ModelConfig config_;
};

// INVARIANT: the C++ front has Python's bits.
TEST_P(DecoderTest, HasPythonsBits) {
  const Case c = MakeCase(config_, 5);
  WriteCase(c, dir_.File("case.json"));
  const std::string command = absl::StrCat(ISOBIT_FRONT_PYTHON, " ", dir_.File("model"), " ",
                                           dir_.File("case.json"), " ", dir_.File("python"));
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  const auto python = Checkpoint::Open(dir_.File("python"));
  ASSERT_THAT(python, IsOk());
  std::ifstream names(dir_.File("python/names.json"));

  const auto decoder = Load("model");
  EXPECT_EQ(decoder->named_parameters().keys(),
            nlohmann::json::parse(names).get<std::vector<std::string>>());
  const Results results = Train(*decoder, c);
  EXPECT_EQ(results.size(), python->tensors().size());
  EXPECT_THAT(Unequal(results, *python), testing::IsEmpty());

  const auto control = Load("model");  // packs of one sequence have gradients with other bits
  Results scores, gradients;
  Backward(*control, c, 0, /*pack_tokens=*/1, &scores);
  AddGradients(*control, 0, &gradients);
  EXPECT_THAT(Unequal(gradients, *python), testing::Not(testing::IsEmpty()));
}

TEST_P(DecoderTest, SavesWhatItLoads) {
  const auto decoder = Load("model");
  ASSERT_THAT(decoder->Save(dir_.File("saved")), IsOk());
  const auto again = Load("saved");
  EXPECT_EQ(again->config().CanonicalString(), config_.CanonicalString());
  testing_support::WriteTinyModel(config_, 12, dir_.File("other"));
  const auto other = Load("other");
  const auto before = decoder->named_parameters();
  for (const auto& item : again->named_parameters()) {
    const torch::Tensor expected = before[item.key()].detach();
    EXPECT_TRUE(SameBits(item.value().detach(), expected)) << item.key();
    EXPECT_FALSE(SameBits(other->named_parameters()[item.key()].detach(), expected)) << "control";
  }
}

INSTANTIATE_TEST_SUITE_P(Models, DecoderTest,
                         testing::Values(Model{"Qwen3", Architecture::kQwen3, false},
                                         Model{"Qwen3Tied", Architecture::kQwen3, true},
                                         Model{"LlamaBiases", Architecture::kLlama, false, true},
                                         Model{"LlamaTied", Architecture::kLlama, true},
                                         Model{"Mistral", Architecture::kMistral, false},
                                         Model{"Qwen2Tied", Architecture::kQwen2, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DecoderErrorTest, SaysWhatABatchMustBe) {
  TempDir dir;
  const ModelConfig config = TinyConfig(Architecture::kQwen3);
  testing_support::WriteTinyModel(config, 13, dir.File("model"));
  const auto decoder = Decoder::Load(dir.File("model"));
  ASSERT_THAT(decoder, IsOk());
  const auto message = [&](std::vector<int32_t> ids) {
    const std::vector<TrainingSequence> sequences = {{.ids = std::move(ids)}};
    return std::string((*decoder)->Score(*MakeBatch(sequences, {1})).status().message());
  };
  EXPECT_EQ(message({1, 101}), "expected tokens below 101, got 101");
  EXPECT_EQ(message(std::vector<int32_t>(513, 1)),
            "a sequence has 513 tokens; the model takes 512");
  EXPECT_EQ(message(std::vector<int32_t>(512, 100)), "");
  EXPECT_EQ(Decoder::Load(dir.File("none")).status().code(), absl::StatusCode::kNotFound);
}

TEST(DecoderErrorTest, RefusesWeightsThatAreNotFinite) {
  TempDir dir;
  const ModelConfig config = TinyConfig(Architecture::kQwen3);
  testing_support::TinyWeights weights = testing_support::RandomWeights(config, 13);
  uint16_t& value = weights.tensors["model.layers.1.mlp.up_proj.weight"][5];
  for (const uint16_t bad : {0x7fc0, 0x7f80, 0xff80}) {  // NaN, infinities
    value = bad;
    testing_support::WriteModel(config, weights, dir.File("model"));
    EXPECT_EQ(Decoder::Load(dir.File("model")).status().message(),
              "tensor model.layers.1.mlp.up_proj.weight holds a NaN or an infinity in bf16, "
              "expected finite weights");
  }
  value = 0x7f7f;  // control: the greatest finite value
  testing_support::WriteModel(config, weights, dir.File("model"));
  EXPECT_THAT(Decoder::Load(dir.File("model")), IsOk());
}

TEST(DecoderErrorTest, RefusesAHeadThatIsNotTheTiedEmbedding) {
  TempDir dir;
  ModelConfig config = TinyConfig(Architecture::kQwen3);
  config.tie_word_embeddings = false;
  testing_support::TinyWeights weights = testing_support::RandomWeights(config, 13);
  const auto load = [&] {
    testing_support::WriteModel(config, weights, dir.File("model"));  // with both tensors
    ModelConfig tied = config;
    tied.tie_word_embeddings = true;
    EXPECT_THAT(WriteConfigJson(tied, dir.File("model")), IsOk());
    return Decoder::Load(dir.File("model"));
  };
  EXPECT_EQ(load().status().message(),
            "tensor lm_head.weight differs from model.embed_tokens.weight, to which config.json "
            "ties it");
  weights.tensors["lm_head.weight"] = weights.tensors["model.embed_tokens.weight"];
  EXPECT_THAT(load(), IsOk());  // control
}

}  // namespace
}  // namespace isobit::front
