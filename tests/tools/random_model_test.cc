// Random models: their weights depend only on seed and shape, not on machine or file size.
#include "tools/random_model.h"

#include <cmath>
#include <filesystem>
#include <set>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/validate_tensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
#include "tests/support/all_tensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"

namespace isobit {
namespace {

using testing_support::StatusIs;
using testing_support::TempDir;

std::string DigestOf(const std::string& directory) {
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(directory);
  EXPECT_THAT(config, testing_support::IsOk());
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(directory);
  EXPECT_THAT(checkpoint, testing_support::IsOk());
  ISOBIT_EXPECT_OK(ValidateTensors(ModelPlan(*config), *checkpoint));
  return DigestTensors(*checkpoint)->checkpoint;
}

TEST(ModelShapesTest, EveryShapeIsValidAndSaysWhatItIsCalled) {
  for (const std::string& name : ModelShapeNames()) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, NamedModelShape(name));
    ISOBIT_EXPECT_OK(ValidateModelConfig(config)) << name;
  }
  EXPECT_THAT(NamedModelShape("tiny-gpt"),
              StatusIs(absl::StatusCode::kNotFound, testing::HasSubstr("tiny-llama")));
}

TEST(ModelShapesTest, TheTinyOnesAreAwkward) {
  for (const char* name : {"tiny-qwen3", "tiny-qwen2", "tiny-llama", "tiny-mistral"}) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, NamedModelShape(name));
    EXPECT_NE(config.num_kv_heads % 4, 0);
    EXPECT_NE(config.hidden_size % 16, 0);
    EXPECT_NE(config.intermediate_size % 16, 0);
    EXPECT_NE(config.vocab_size % 8, 0);
    EXPECT_NE(config.head_dim, config.hidden_size / config.num_heads);
  }
}

// Golden digests elsewhere depend on these bytes.
TEST(RandomModelTest, TheBytesOfASeedAreFixed) {
  const TempDir dir;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, NamedModelShape("tiny-llama"));
  ISOBIT_ASSERT_OK(MakeRandomModel(config, 1, dir.File("model")));
  EXPECT_EQ(DigestOf(dir.File("model")),
            "ba95778ebfadf99a077e288091b333d6e0920b74cb7291efafee306fbc8f7023");
  ISOBIT_ASSERT_OK(MakeRandomModel(config, 2, dir.File("other")));
  EXPECT_NE(DigestOf(dir.File("other")), DigestOf(dir.File("model")));
}

TEST(RandomModelTest, ManyFilesHoldTheSameWeights) {
  const TempDir dir;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, NamedModelShape("tiny-mistral"));
  ISOBIT_ASSERT_OK(MakeRandomModel(config, 1, dir.File("one")));
  uint64_t done = 0;
  uint64_t total = 0;
  RandomModelOptions options;
  options.max_file_bytes = 100000;
  options.on_progress = [&](uint64_t done_bytes, uint64_t total_bytes) {
    EXPECT_GT(done_bytes, done);
    done = done_bytes;
    total = total_bytes;
  };
  ISOBIT_ASSERT_OK(MakeRandomModel(config, 1, dir.File("many"), options));
  EXPECT_EQ(done, total);
  EXPECT_TRUE(std::filesystem::exists(dir.File("many/model.safetensors.index.json")));
  EXPECT_EQ(DigestOf(dir.File("many")), DigestOf(dir.File("one")));
}

TEST(RandomModelTest, WeightsHaveTheSpreadThatTheHeaderSays) {
  const TempDir dir;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, NamedModelShape("tiny-qwen2"));
  ISOBIT_ASSERT_OK(MakeRandomModel(config, 1, dir.File("model")));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(dir.File("model")));
  const TensorSet tensors = testing_support::AllTensors(checkpoint);
  const auto expect_spread = [&](const char* name, double mean, double deviation) {
    const Tensor& tensor = *tensors.Find(name);
    std::vector<float> values(tensor.NumElements());
    tensor.ToFloat(values.data());
    double sum = 0;
    double squares = 0;
    for (const float value : values) {
      sum += value;
      squares += static_cast<double>(value) * value;
    }
    const double n = static_cast<double>(values.size());
    EXPECT_NEAR(sum / n, mean, 4 * deviation / std::sqrt(n)) << name;
    EXPECT_NEAR(std::sqrt(squares / n - sum / n * (sum / n)), deviation,
                4 * deviation / std::sqrt(2 * n))
        << name;
  };
  expect_spread("lm_head.weight", 0, 2.5 / std::sqrt(93.0));
  expect_spread("model.layers.1.mlp.down_proj.weight", 0, 1 / std::sqrt(173.0));
  expect_spread("model.layers.0.self_attn.q_proj.bias", 0, 0.1);
  expect_spread("model.norm.weight", 1, 0.1);
}

TEST(RandomModelTest, DoesNotWriteIntoADirectoryThatHoldsSomething) {
  const TempDir dir;
  dir.Write("precious", "data");
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, NamedModelShape("tiny-llama"));
  EXPECT_THAT(MakeRandomModel(config, 1, dir.path()), StatusIs(absl::StatusCode::kAlreadyExists));
  ModelConfig bad = config;
  bad.head_dim = 3;
  EXPECT_THAT(MakeRandomModel(bad, 1, dir.File("new")),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_FALSE(std::filesystem::exists(dir.File("new")));
}

}  // namespace
}  // namespace isobit
