// How a checkpoint may deviate from the tensors that its config asks for.
#include "common/checkpoint/validate_tensors.h"

#include <deque>
#include <string>
#include <vector>

#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
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
  explicit Written(const std::vector<ExpectedTensor>& specs) {
    for (const ExpectedTensor& spec : specs) Add(spec.name, spec.shape);
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
    ISOBIT_RETURN_IF_ERROR(ValidateTensors(ModelPlan(config), *checkpoint));
    ISOBIT_ASSIGN_OR_RETURN(const CheckpointDigests digests, DigestTensors(*checkpoint));
    return CheckTiedTensors(ModelPlan(config), digests);
  }

 private:
  std::deque<std::string> bytes_;  // never moves its elements
  std::vector<Tensor> tensors_;
};

TEST(ValidateTensorsTest, AcceptsExactlyTheExpected) {
  for (const Architecture architecture :
       {Architecture::kLlama, Architecture::kMistral, Architecture::kQwen2, Architecture::kQwen3}) {
    const ModelConfig config = TinyConfig(architecture);
    ISOBIT_EXPECT_OK(Written(ExpectedTensors(ModelPlan(config))).Validate(config));
  }
}

TEST(ValidateTensorsTest, NamesMissingUnexpectedAndMisshapen) {
  const ModelConfig config = TinyConfig(Architecture::kQwen3);
  auto specs = ExpectedTensors(ModelPlan(config));
  for (ExpectedTensor& spec : specs) {
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
  Written equal(ExpectedTensors(ModelPlan(config)));
  equal.Add("lm_head.weight", {5, 7});
  ISOBIT_EXPECT_OK(equal.Validate(config));
  Written unequal(ExpectedTensors(ModelPlan(config)));
  unequal.Add("lm_head.weight", {5, 7}, '\1');
  EXPECT_THAT(unequal.Validate(config),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("lm_head.weight"), HasSubstr("ties it"))));
  config.tie_word_embeddings = false;
  Written untied(ExpectedTensors(ModelPlan(TinyConfig(Architecture::kLlama))));
  ISOBIT_EXPECT_OK(untied.Validate(config));
}

TEST(ValidateTensorsTest, IgnoresRotaryBuffers) {
  const ModelConfig config = TinyConfig(Architecture::kLlama);
  Written written(ExpectedTensors(ModelPlan(config)));
  for (const char* name :
       {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq", "model.layers.1.self_attn.rotary_emb.cos_cached"}) {
    written.Add(name, {1}, '\xff');  // nobody reads its NaN
  }
  ISOBIT_EXPECT_OK(written.Validate(config));
  written.Add("model.layers.0.self_attn.inv_freq", {1});
  EXPECT_THAT(written.Validate(config),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("self_attn.inv_freq")));
}

}  // namespace
}  // namespace isobit
