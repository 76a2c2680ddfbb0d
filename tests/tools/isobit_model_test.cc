// The isobit-model binary, as a user runs it.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"
#include "tests/tools/run_tool.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using testing_support::Outcome;
using testing_support::TempDir;

Outcome RunTool(const std::string& arguments) {
  return testing_support::RunTool(ISOBIT_MODEL, arguments);
}

std::string Bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(IsobitModelTest, MakesVerifiesAndInspects) {
  const TempDir dir;
  const std::string model = dir.File("model");
  EXPECT_EQ(RunTool("make tiny-llama " + model + " --seed=1").exit_code, 0);
  const Outcome verified = RunTool("verify " + model);
  EXPECT_EQ(verified.exit_code, 0);
  const std::string digest = verified.output.substr(0, 64);
  EXPECT_EQ(digest, "ba95778ebfadf99a077e288091b333d6e0920b74cb7291efafee306fbc8f7023");

  const Outcome inspected = RunTool("inspect " + model);
  EXPECT_EQ(inspected.exit_code, 0);
  for (const char* text : {"LlamaForCausalLM", "367686 parameters", "fingerprint tree",
                           "model.layers.2.mlp.down_proj.weight", "[99, 173]", "TP 8 rank 7"}) {
    EXPECT_THAT(inspected.output, HasSubstr(text));
  }
  EXPECT_THAT(inspected.output, HasSubstr(digest));
  // What services reported before digests were those of values.
  EXPECT_THAT(inspected.output,
              HasSubstr("c55c205cdbfb08acacb71adcb6e23be3d9227b8a810ff9de996b2860c01e9c06"));
}

TEST(IsobitModelTest, MakesAModelOfAGivenConfig) {
  const TempDir dir;
  ASSERT_EQ(RunTool("make tiny-qwen3 " + dir.File("a") + " --seed 7").exit_code, 0);
  ASSERT_EQ(RunTool("make --config " + dir.File("a") + "/config.json --seed=7 " + dir.File("b"))
                .exit_code,
            0);
  EXPECT_EQ(Bytes(dir.File("a/model.safetensors")), Bytes(dir.File("b/model.safetensors")));
  EXPECT_EQ(Bytes(dir.File("a/config.json")), Bytes(dir.File("b/config.json")));
}

TEST(IsobitModelTest, WritesTheConfigOfAShapeAlone) {
  const TempDir dir;
  ASSERT_EQ(RunTool("config tiny-qwen3 " + dir.File("config")).exit_code, 0);
  ASSERT_EQ(RunTool("make tiny-qwen3 " + dir.File("model")).exit_code, 0);
  EXPECT_EQ(Bytes(dir.File("config/config.json")), Bytes(dir.File("model/config.json")));
  EXPECT_FALSE(std::filesystem::exists(dir.File("config/model.safetensors")));
  EXPECT_EQ(RunTool("config tiny-qwen3 " + dir.File("config")).exit_code, 1);
}

TEST(IsobitModelTest, WritesTheSeedOfDummyWeights) {
  const TempDir dir;
  ASSERT_EQ(RunTool("config qwen3-8b " + dir.File("model") + " --seed=7").exit_code, 0);
  EXPECT_EQ(Bytes(dir.File("model/dummy_weights.json")), "{\"seed\": 7}\n");
  EXPECT_THAT(Bytes(dir.File("model/config.json")), HasSubstr("\"hidden_size\": 4096"));
  EXPECT_EQ(RunTool("verify " + dir.File("model")).exit_code, 1);  // no weights to verify
}

TEST(IsobitModelTest, ChecksAConfigWithoutWeights) {
  const TempDir dir;
  ASSERT_EQ(RunTool("config qwen3-8b " + dir.File("model")).exit_code, 0);
  for (const std::string& path : {dir.File("model"), dir.File("model/config.json")}) {
    const Outcome checked = RunTool("check " + path);
    EXPECT_EQ(checked.exit_code, 0) << checked.output;
    EXPECT_THAT(checked.output,
                StartsWith("Qwen3ForCausalLM, 8190735360 parameters, context 40960\n"));
  }
  std::ofstream(dir.File("other.json")) << R"({"architectures": ["MixtralForCausalLM"]})";
  const Outcome refused = RunTool("check " + dir.File("other.json"));
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.output, HasSubstr("mixture of experts"));
}

TEST(IsobitModelTest, FlipsOneBitAndNothingElse) {
  const TempDir dir;
  const std::string model = dir.File("model");
  ASSERT_EQ(RunTool("make tiny-mistral " + model).exit_code, 0);
  std::ofstream(dir.File("model/tokenizer.json")) << "{}";
  const Outcome flipped =
      RunTool("flip-bit " + model + " model.norm.weight 3 9 " + dir.File("flipped"));
  EXPECT_EQ(flipped.exit_code, 0) << flipped.output;
  EXPECT_THAT(flipped.output, StartsWith("model.norm.weight[3] bit 9: 0x"));
  EXPECT_EQ(RunTool("verify " + dir.File("flipped")).exit_code, 0);

  for (const char* name : {"config.json", "generation_config.json", "tokenizer.json"}) {
    EXPECT_EQ(Bytes(dir.File(std::string("flipped/") + name)), Bytes(model + "/" + name)) << name;
  }
  const std::string before = Bytes(model + "/model.safetensors");
  const std::string after = Bytes(dir.File("flipped/model.safetensors"));
  ASSERT_EQ(before.size(), after.size());
  int changed_bits = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    changed_bits += __builtin_popcount(static_cast<uint8_t>(before[i] ^ after[i]));
  }
  EXPECT_EQ(changed_bits, 1);
}

TEST(IsobitModelTest, FailsWithStatusOneAndSaysWhy) {
  const TempDir dir;
  const std::string model = dir.File("model");
  ASSERT_EQ(RunTool("make tiny-qwen2 " + model).exit_code, 0);
  const auto expect_failure = [](const std::string& arguments, const std::string& text) {
    const Outcome outcome = RunTool(arguments);
    EXPECT_EQ(outcome.exit_code, 1) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr(text)) << arguments;
  };
  expect_failure("make tiny-gpt " + dir.File("x"), "tiny-qwen2");
  expect_failure("make tiny-qwen2 " + model, "not empty");
  expect_failure("make tiny-qwen2 --seed=x " + dir.File("x"), "--seed");
  expect_failure("make --config=" + dir.File("none") + " " + dir.File("x"), "none");
  expect_failure("verify " + dir.File("none"), "none");
  expect_failure("inspect " + dir.File("none"), "none");
  expect_failure("flip-bit " + model + " nothing 0 0 " + dir.File("x"), "nothing");
  expect_failure("flip-bit " + model + " model.norm.weight 93 0 " + dir.File("x"), "at most 92");
  expect_failure("flip-bit " + model + " model.norm.weight 0 16 " + dir.File("x"), "0 to 15");
  expect_failure("flip-bit " + model + " model.norm.weight 0 0 " + model, "not empty");

  const std::string file = model + "/model.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  expect_failure("verify " + model, "model.safetensors");
}

TEST(IsobitModelTest, VerifiesUnderTheServicesPolicy) {
  const TempDir dir;
  const std::string model = dir.File("model");
  ASSERT_EQ(RunTool("make tiny-qwen3 " + model).exit_code, 0);
  std::string config = Bytes(model + "/config.json");
  config.insert(config.find('{') + 1, "\"auto_map\": {\"AutoConfig\": \"x.Y\"},");
  std::ofstream(model + "/config.json") << config;
  const Outcome refused = RunTool("verify " + model);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.output, HasSubstr("field \"auto_map\" is not supported"));
  EXPECT_THAT(refused.output, HasSubstr("--ignore_config_fields"));
  const Outcome ignored = RunTool("verify " + model + " --ignore_config_fields=auto_map,other");
  EXPECT_EQ(ignored.exit_code, 0);
  EXPECT_THAT(ignored.output, HasSubstr("warning: config.json: field \"auto_map\""));
  EXPECT_EQ(RunTool("verify " + model + " --ignore_config_fields=vocab_size").exit_code, 1);
  EXPECT_EQ(RunTool("make tiny-qwen3 " + dir.File("x") + " --round_fp16_weights").exit_code, 2);
}

TEST(IsobitModelTest, RefusesWeightsThatAreNotFinite) {
  const TempDir dir;
  ASSERT_EQ(RunTool("make tiny-qwen3 " + dir.File("model")).exit_code, 0);
  // It is 1 or a little more, so that its exponent lacks the highest bit alone.
  const Outcome flipped =
      RunTool("flip-bit " + dir.File("model") + " model.norm.weight 1 14 " + dir.File("bad"));
  ASSERT_EQ(flipped.exit_code, 0) << flipped.output;
  for (const char* command : {"verify ", "inspect "}) {
    const Outcome refused = RunTool(command + dir.File("bad"));
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_THAT(refused.output, HasSubstr("tensor \"model.norm.weight\": the value at [1]"));
    EXPECT_EQ(RunTool(command + dir.File("bad") + " --allow_nonfinite_weights").exit_code, 0);
  }
  EXPECT_EQ(RunTool("make tiny-qwen3 " + dir.File("x") + " --allow_nonfinite_weights").exit_code,
            2);
}

TEST(IsobitModelTest, OpensASnapshotOfTheHubsCache) {
  namespace fs = std::filesystem;
  const TempDir dir;
  ASSERT_EQ(RunTool("make tiny-qwen3 " + dir.File("model")).exit_code, 0);
  const std::string snapshot = dir.File("hub/models--org--tiny/snapshots/0123abc");
  fs::create_directories(snapshot);
  fs::create_directories(dir.File("hub/models--org--tiny/blobs"));
  for (const auto& entry : fs::directory_iterator(dir.File("model"))) {
    const std::string name = entry.path().filename();
    fs::copy(entry.path(), dir.File("hub/models--org--tiny/blobs/" + name));
    fs::create_symlink("../../blobs/" + name, snapshot + "/" + name);
  }
  for (const char* command : {"verify ", "inspect "}) {
    const Outcome outcome = RunTool(command + snapshot);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  }
}

TEST(IsobitModelTest, ACommandLineThatMakesNoSenseExitsTwo) {
  for (const char* arguments :
       {"", "bake", "make tiny-llama", "make tiny-llama a b", "verify", "verify a --seed=1",
        "make tiny-llama a --speed=1", "flip-bit a b", "make tiny-llama a --seed"}) {
    const Outcome outcome = RunTool(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr("--help")) << arguments;
  }
  const Outcome help = RunTool("--help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.output, HasSubstr("flip-bit"));
  EXPECT_EQ(RunTool("make --help").exit_code, 0);
}

}  // namespace
}  // namespace isobit
