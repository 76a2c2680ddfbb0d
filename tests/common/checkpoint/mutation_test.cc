// Thousands of mutated headers and configs from a fixed seed: a parser may refuse them, never
// crash, and what it accepts must hold together. Run it under the address sanitizer to see reads
// out of bounds.
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "common/checkpoint/model_config.h"
#include "common/checkpoint/safetensors.h"
#include "gtest/gtest.h"
#include "tests/common/checkpoint/raw_safetensors.h"

namespace isobit {
namespace {

// Fragments that steer mutations towards the parsers' decisions.
const char* const kFragments[] = {
    "-1",
    "0",
    "2",
    "8",
    "1e999",
    "18446744073709551615",
    "9223372036854775807",
    "4294967296",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "null",
    "true",
    "\"\"",
    "\\u0000",
    "BF16",
    "F32",
    "I8",
    "[0,0]",
    "\"shape\"",
    "\"dtype\"",
    "data_offsets",
    "silu",
    "llama3",
    "yarn",
    "\"head_dim\":3,",
    "[[[[[[[[",
};

std::string Mutate(std::string text, std::mt19937& random) {
  const auto pick = [&](size_t count) { return random() % std::max<size_t>(count, 1); };
  for (size_t edits = 1 + pick(4); edits > 0; --edits) {
    const size_t at = pick(text.size());
    switch (pick(6)) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(random());
        break;
      case 1:
        if (!text.empty()) text[at] ^= static_cast<char>(1 << pick(8));
        break;
      case 2:
        text.erase(at, 1 + pick(8));
        break;
      case 3:
        text.insert(at, kFragments[pick(std::size(kFragments))]);
        break;
      case 4:
        text.insert(at, text.substr(pick(text.size()), pick(40)));
        break;
      case 5:
        text.resize(at);
        break;
    }
  }
  return text;
}

TEST(MutationTest, SafetensorsParserSurvives) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},)"
      R"("c":{"dtype":"F16","shape":[],"data_offsets":[32,34]}})";
  const std::string data(34, 'd');
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    // Half of the time the length field is made to fit again, so that the header itself is reached.
    const std::string file = i % 2 == 0 ? RawSafetensors(Mutate(header, random), data)
                                        : Mutate(RawSafetensors(header, data), random);
    const std::vector<char> bytes(file.begin(), file.end());
    const auto tensors = ParseSafetensors({bytes.data(), bytes.size()}, bytes.size(), "mutant");
    if (!tensors.ok()) {
      ASSERT_EQ(tensors.status().code(), absl::StatusCode::kInvalidArgument);
      ASSERT_NE(tensors.status().message().find("mutant"), absl::string_view::npos);
      continue;
    }
    ++accepted;
    for (auto [tensor, offset] : *tensors) {
      tensor.data = reinterpret_cast<const uint8_t*>(bytes.data()) + offset;
      ASSERT_EQ(tensor.size_bytes, *TensorBytes(tensor.dtype, tensor.shape));
      std::vector<uint16_t> converted(tensor.NumElements());
      tensor.ToBf16(converted.data());
    }
  }
  EXPECT_GT(accepted, 20);  // else the mutations are too wild to test anything past the JSON
}

TEST(MutationTest, ConfigParserSurvives) {
  const std::string config =
      R"({"architectures":["Qwen3ForCausalLM"],"vocab_size":99,"hidden_size":64,"head_dim":16,)"
      R"("intermediate_size":128,"num_hidden_layers":2,"num_attention_heads":4,"rope_theta":1e6,)"
      R"("num_key_value_heads":2,"rms_norm_eps":1e-6,"max_position_embeddings":512,)"
      R"("use_sliding_window":true,"sliding_window":8,"layer_types":["full_attention",)"
      R"("sliding_attention"],"eos_token_id":[1,2],"hidden_act":"silu","dtype":"bfloat16",)"
      R"("rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,)"
      R"("high_freq_factor":4,"original_max_position_embeddings":64}})";
  ASSERT_TRUE(ParseModelConfig(config).ok()) << ParseModelConfig(config).status();
  std::mt19937 random(2);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto parsed = ParseModelConfig(Mutate(config, random), Mutate(config, random));
    const auto alone = ParseModelConfig(Mutate(config, random));
    for (const auto& result : {parsed, alone}) {
      if (!result.ok()) {
        ASSERT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
        continue;
      }
      ++accepted;
      ASSERT_TRUE(ValidateModelConfig(*result).ok());
      ASSERT_FALSE(result->CanonicalString().empty());
    }
  }
  EXPECT_GT(accepted, 20);
}

}  // namespace
}  // namespace isobit
