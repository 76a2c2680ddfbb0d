// The tensors that each architecture must have, and what a checkpoint may deviate in.
#include "common/checkpoint/tensor_names.h"

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TempDir;

ModelConfig TinyConfig(Architecture architecture) {
  ModelConfig config;
  config.architecture = architecture;
  config.vocab_size = 5;
  config.hidden_size = 7;
  config.intermediate_size = 11;
  config.num_layers = 2;
  config.num_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 2;
  config.rms_norm_eps = 1e-6f;
  config.max_position_embeddings = 64;
  config.qk_norm = architecture == Architecture::kQwen3;
  config.qkv_bias = architecture == Architecture::kQwen2;
  return config;
}

// Tensors of zeros, from specs that a test may have changed.
class Written {
 public:
  explicit Written(const std::vector<TensorSpec>& specs) {
    for (const TensorSpec& spec : specs) Add(spec.name, spec.shape);
  }

  void Add(const std::string& name, const std::vector<int64_t>& shape, char fill = '\0') {
    const size_t size = *TensorBytes(DType::kBf16, shape);
    const std::string& bytes = bytes_.emplace_back(size, fill);
    tensors_.push_back(
        {name, DType::kBf16, shape, reinterpret_cast<const uint8_t*>(bytes.data()), size});
  }

  absl::Status Validate(const ModelConfig& config) const {
    const TempDir dir;
    ISOBIT_EXPECT_OK(WriteSafetensors(dir.File("model.safetensors"), tensors_));
    const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(dir.path());
    ISOBIT_RETURN_IF_ERROR(checkpoint.status());
    ISOBIT_RETURN_IF_ERROR(ValidateTensors(config, *checkpoint));
    ISOBIT_ASSIGN_OR_RETURN(const CheckpointDigests digests, DigestTensors(*checkpoint));
    return CheckTiedHead(config, digests);
  }

 private:
  std::deque<std::string> bytes_;  // never moves its elements
  std::vector<Tensor> tensors_;
};

std::vector<int64_t> ShapeOf(const std::vector<TensorSpec>& specs, const std::string& name) {
  for (const TensorSpec& spec : specs) {
    if (spec.name == name) return spec.shape;
  }
  return {-1};
}

TEST(TensorNamesTest, ShapesFollowHeadsNotHiddenSize) {
  const auto specs = ExpectedTensors(TinyConfig(Architecture::kQwen3));
  EXPECT_EQ(ShapeOf(specs, "model.layers.1.self_attn.q_proj.weight"),
            (std::vector<int64_t>{18, 7}));
  EXPECT_EQ(ShapeOf(specs, "model.layers.1.self_attn.k_proj.weight"), (std::vector<int64_t>{6, 7}));
  EXPECT_EQ(ShapeOf(specs, "model.layers.1.self_attn.o_proj.weight"),
            (std::vector<int64_t>{7, 18}));
  EXPECT_EQ(ShapeOf(specs, "model.layers.1.self_attn.q_norm.weight"), (std::vector<int64_t>{2}));
  EXPECT_EQ(ShapeOf(specs, "model.layers.0.mlp.down_proj.weight"), (std::vector<int64_t>{7, 11}));
  EXPECT_EQ(ShapeOf(specs, "lm_head.weight"), (std::vector<int64_t>{5, 7}));
  EXPECT_EQ(specs.size(), 3u + 2 * 11);
}

TEST(TensorNamesTest, BiasesAndTyingFollowTheConfig) {
  ModelConfig config = TinyConfig(Architecture::kQwen2);
  auto specs = ExpectedTensors(config);
  EXPECT_EQ(ShapeOf(specs, "model.layers.0.self_attn.v_proj.bias"), (std::vector<int64_t>{6}));
  EXPECT_EQ(ShapeOf(specs, "model.layers.0.self_attn.o_proj.bias"), (std::vector<int64_t>{-1}));
  EXPECT_EQ(specs.size(), 3u + 2 * 12);
  config = TinyConfig(Architecture::kLlama);
  config.qkv_bias = config.o_bias = config.mlp_bias = config.tie_word_embeddings = true;
  specs = ExpectedTensors(config);
  EXPECT_EQ(ShapeOf(specs, "model.layers.0.self_attn.o_proj.bias"), (std::vector<int64_t>{7}));
  EXPECT_EQ(ShapeOf(specs, "model.layers.0.mlp.gate_proj.bias"), (std::vector<int64_t>{11}));
  EXPECT_EQ(specs.size(), 2u + 2 * 16);
}

TEST(ValidateTensorsTest, AcceptsExactlyTheExpected) {
  for (const Architecture architecture :
       {Architecture::kLlama, Architecture::kMistral, Architecture::kQwen2, Architecture::kQwen3}) {
    const ModelConfig config = TinyConfig(architecture);
    ISOBIT_EXPECT_OK(Written(ExpectedTensors(config)).Validate(config));
  }
}

TEST(ValidateTensorsTest, NamesMissingUnexpectedAndMisshapen) {
  const ModelConfig config = TinyConfig(Architecture::kQwen3);
  auto specs = ExpectedTensors(config);
  for (TensorSpec& spec : specs) {
    if (spec.name == "model.norm.weight") spec.shape = {8};
    if (spec.name == "model.layers.1.self_attn.k_norm.weight") spec.name = "extra\"name";
  }
  EXPECT_THAT(Written(specs).Validate(config),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("missing tensors: model.layers.1.self_attn.k_norm.weight"),
                             HasSubstr(R"(unexpected tensors: "extra\"name")"),
                             HasSubstr("model.norm.weight is [8], expected [7]"))));
  EXPECT_THAT(Written({specs[0]}).Validate(config),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("and 19 more")));
}

TEST(ValidateTensorsTest, TiedLmHeadMustEqualTheEmbedding) {
  ModelConfig config = TinyConfig(Architecture::kLlama);
  config.tie_word_embeddings = true;
  Written equal(ExpectedTensors(config));
  equal.Add("lm_head.weight", {5, 7});
  ISOBIT_EXPECT_OK(equal.Validate(config));
  Written unequal(ExpectedTensors(config));
  unequal.Add("lm_head.weight", {5, 7}, '\1');
  EXPECT_THAT(unequal.Validate(config),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("lm_head.weight"), HasSubstr("ties it"))));
  config.tie_word_embeddings = false;
  Written untied(ExpectedTensors(TinyConfig(Architecture::kLlama)));
  ISOBIT_EXPECT_OK(untied.Validate(config));
}

TEST(ValidateTensorsTest, IgnoresRotaryBuffers) {
  const ModelConfig config = TinyConfig(Architecture::kLlama);
  Written written(ExpectedTensors(config));
  written.Add("model.layers.0.self_attn.rotary_emb.inv_freq", {1});
  ISOBIT_EXPECT_OK(written.Validate(config));
}

}  // namespace
}  // namespace isobit
