// Holds the table of models to the parser: what the table says is supported is taken, and nothing
// else.
#include "common/checkpoint/supported_models.h"

#include <set>
#include <string>

#include "common/checkpoint/model_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/common/checkpoint/config_json.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Base;
using testing_support::StatusIs;

TEST(SupportedModelsTest, TheTableSaysWhatTheParserTakes) {
  const json table = json::parse(kSupportedModelsJson);
  std::set<std::string> supported;
  for (const json& row : table["families"]) {
    for (const std::string architecture : row["architectures"]) {
      const auto config = ParseModelConfig(Base(architecture).dump());
      if (row["supported"].get<bool>()) {
        ASSERT_TRUE(config.ok()) << config.status();
        EXPECT_EQ(row["model_types"], json::array({ModelTypeName(config->architecture)}));
        supported.insert(architecture);
      } else {
        EXPECT_THAT(config, StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr(row["why"].get<std::string>())));
      }
    }
  }
  const std::set<std::string> known = {
      ArchitectureName(Architecture::kLlama), ArchitectureName(Architecture::kMistral),
      ArchitectureName(Architecture::kQwen2), ArchitectureName(Architecture::kQwen3)};
  EXPECT_EQ(supported, known);
}

TEST(SupportedModelsTest, AnErrorNamesTheReasonAndWhatIsSupported) {
  EXPECT_THAT(DescribeUnsupported("Qwen3_5ForCausalLM"), HasSubstr("gated delta net"));
  EXPECT_THAT(DescribeUnsupported("Qwen3_5ForCausalLM"), HasSubstr("Qwen3 (Qwen3ForCausalLM)"));
  EXPECT_EQ(DescribeUnsupported("UnheardOf").substr(0, 20), ", supported: Llama (");
}

}  // namespace
}  // namespace isobit
