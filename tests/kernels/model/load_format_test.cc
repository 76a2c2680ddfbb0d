// Dummy weights equal those that isobit-model writes for the same seed, for every cut, and their
// digest tells configs and seeds apart.
#include "kernels/model/load_format.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "common/checkpoint/safetensors.h"
#include "common/checkpoint/validate_tensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
#include "tests/support/all_tensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

class LoadFormatTest : public testing::Test {
 protected:
  std::string MakeDummy(const std::string& shape, uint64_t seed) {
    const std::string name = shape + std::to_string(seed);
    ISOBIT_EXPECT_OK(MakeDummyModel(*NamedModelShape(shape), seed, root_.File(name)));
    return name;
  }
  absl::StatusOr<OpenedModel> OpenDummy(const std::string& name) const {
    return OpenModelAs(LoadFormat::kDummy, root_.path(), name);
  }

  std::string MakeDirectory(const std::string& name) {
    std::filesystem::create_directory(root_.File(name));
    return root_.File(name);
  }

  const testing_support::TempDir root_;
};

TEST_F(LoadFormatTest, EveryElementIsTheOneOfTheFiles) {
  for (const char* shape : {"tiny-qwen3", "tiny-qwen2", "tiny-llama"}) {
    ISOBIT_ASSERT_OK(MakeRandomModel(*NamedModelShape(shape), 7, root_.File("stored")));
    ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel stored,
                                OpenModelAs(LoadFormat::kAuto, root_.path(), "stored"));
    ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel dummy, OpenDummy(MakeDummy(shape, 7)));
    ISOBIT_EXPECT_OK(ValidateTensors(ModelPlan(dummy.config), *dummy.weights));
    ASSERT_EQ(dummy.weights->tensors().size(), stored.weights->tensors().size());
    const TensorSet files = testing_support::AllTensors(*stored.weights);
    for (size_t i = 0; i < stored.weights->tensors().size(); ++i) {
      const Tensor& expected = *files.Find(dummy.weights->tensors()[i].name);
      std::vector<uint8_t> drawn(expected.size_bytes);
      const size_t cut = drawn.size() / 6 * 2;
      ISOBIT_ASSERT_OK(dummy.weights->Read(i, cut, drawn.size() - cut, drawn.data() + cut));
      ISOBIT_ASSERT_OK(dummy.weights->Read(i, 0, cut, drawn.data()));
      EXPECT_EQ(std::memcmp(drawn.data(), expected.data, drawn.size()), 0) << expected.name;
    }
    std::filesystem::remove_all(root_.File("stored"));
  }
}

TEST_F(LoadFormatTest, RoundsFp16OnlyWhenTold) {
  const ModelConfig config = *NamedModelShape("tiny-qwen3");
  ISOBIT_ASSERT_OK(WriteConfigJson(config, MakeDirectory("half")));
  std::vector<std::vector<uint16_t>> halves;
  std::vector<Tensor> tensors;
  for (const ExpectedTensor& spec : ExpectedTensors(ModelPlan(config))) {
    halves.emplace_back(spec.NumElements(), uint16_t{0x3c01});  // 1 + 2^-10, no bf16 number
    tensors.push_back({.name = spec.name,
                       .dtype = spec.name == "model.norm.weight" ? DType::kF16 : DType::kBf16,
                       .shape = spec.shape,
                       .data = reinterpret_cast<const uint8_t*>(halves.back().data()),
                       .size_bytes = halves.back().size() * sizeof(uint16_t)});
  }
  ISOBIT_ASSERT_OK(WriteSafetensors(root_.File("half/model.safetensors"), std::move(tensors)));
  EXPECT_THAT(OpenModelAs(LoadFormat::kAuto, root_.path(), "half").status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       testing::AllOf(HasSubstr("1 of 35 tensors are F16, \"model.norm.weight\" "
                                                "the first, expected BF16 or F32"),
                                      HasSubstr("--round_fp16_weights"))));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel model,
                              OpenModelAs(LoadFormat::kAuto, root_.path(), "half",
                                          {.ignored_fields = {}, .round_fp16 = true}));
  EXPECT_THAT(Warnings(model.config, *model.weights),
              testing::ElementsAre("1 of 35 tensors are F16, \"model.norm.weight\" the first: "
                                   "rounded to bf16"));
}

TEST_F(LoadFormatTest, IgnoresFieldsWhenTold) {
  const std::string name = MakeDummy("tiny-qwen3", 1);
  std::string text;
  {
    std::ifstream file(root_.File(name + "/config.json"));
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  text.insert(text.find('{') + 1, "\"auto_map\": {},");
  std::ofstream(root_.File(name + "/config.json")) << text;
  EXPECT_THAT(OpenDummy(name).status(), StatusIs(absl::StatusCode::kInvalidArgument,
                                                 HasSubstr("\"auto_map\" is not supported")));
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const OpenedModel model,
      OpenModelAs(LoadFormat::kDummy, root_.path(), name, {.ignored_fields = {"auto_map"}}));
  EXPECT_THAT(Warnings(model.config, *model.weights),
              testing::ElementsAre(HasSubstr("\"auto_map\" (value \"{}\") is ignored")));
}

TEST_F(LoadFormatTest, TheDigestTellsConfigAndSeed) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel first, OpenDummy(MakeDummy("tiny-qwen3", 1)));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel again, OpenDummy("tiny-qwen31"));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel seed, OpenDummy(MakeDummy("tiny-qwen3", 2)));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel shape, OpenDummy(MakeDummy("tiny-qwen2", 1)));
  const std::string digest = first.weights->known_digest();
  EXPECT_EQ(digest.size(), 64u);
  EXPECT_EQ(again.weights->known_digest(), digest);
  EXPECT_EQ(
      (std::set<std::string>{digest, seed.weights->known_digest(), shape.weights->known_digest()}
           .size()),
      3u);
  EXPECT_EQ(*CheckDigests(*DigestTensors(*first.weights), ModelPlan(first.config), digest), digest);
  EXPECT_THAT(CheckDigests(*DigestTensors(*seed.weights), ModelPlan(seed.config), digest),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(digest)));
}

TEST_F(LoadFormatTest, NeedsOnlyAConfigAndTakesSeedZeroWithoutASeedFile) {
  const ModelConfig config = *NamedModelShape("tiny-qwen3");
  std::filesystem::create_directory(root_.File("bare"));
  ISOBIT_ASSERT_OK(WriteConfigJson(config, root_.File("bare")));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel bare, OpenDummy("bare"));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const OpenedModel zero, OpenDummy(MakeDummy("tiny-qwen3", 0)));
  EXPECT_EQ(bare.weights->known_digest(), zero.weights->known_digest());
}

TEST_F(LoadFormatTest, RefusesWhatItWouldHaveToIgnore) {
  const std::string invalid = MakeDummy("tiny-qwen3", 3);
  for (const char* seed : {"{}", "{\"seed\": -1}", "{\"seed\": \"3\"}", "3"}) {
    root_.Write(invalid + "/dummy_weights.json", seed);
    EXPECT_THAT(OpenDummy(invalid),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dummy_weights.json")))
        << seed;
  }
  ISOBIT_ASSERT_OK(MakeRandomModel(*NamedModelShape("tiny-qwen3"), 3, root_.File("stored")));
  EXPECT_THAT(OpenDummy("stored"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("model.safetensors")));
  EXPECT_THAT(OpenDummy("absent"), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(ParseLoadFormat("gguf"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("gguf")));
}

}  // namespace
}  // namespace isobit
