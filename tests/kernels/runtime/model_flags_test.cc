// The flags that rollout and scorer share.
#include "kernels/runtime/model_flags.h"

#include <string>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "common/config/flags.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

class ModelFlagsTest : public testing::Test {
 protected:
  static void Give(const std::vector<std::string>& flags) {
    std::vector<const char*> arguments = {"service"};
    for (const std::string& flag : flags) arguments.push_back(flag.c_str());
    ISOBIT_ASSERT_OK(ParseFlags(static_cast<int>(arguments.size()), arguments.data()));
  }

  const absl::FlagSaver saver_;
};

TEST_F(ModelFlagsTest, WhatIsNotGiven) {
  Give({"--model_root=models", "--model=tiny"});
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelSettings model, ModelSettingsFromFlags());
  EXPECT_EQ(model.root, "models");
  EXPECT_EQ(model.name, "tiny");
  EXPECT_EQ(model.load_format, LoadFormat::kAuto);
  EXPECT_FALSE(model.load_policy.round_fp16);
  EXPECT_EQ(model.numerics, NumericsMode::kTree);
  EXPECT_EQ(model.max_context, 0);
  EXPECT_EQ(model.max_batch_tokens, std::nullopt);
  EXPECT_TRUE(model.prefix_sharing);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const BackendSettings backend, BackendSettingsFromFlags(2, 4));
  EXPECT_EQ(backend.backend, BackendKind::kCpu);
  EXPECT_EQ(backend.cpu.num_threads, 1);
  EXPECT_EQ(backend.devices, std::vector<int>({4, 5}));
}

TEST_F(ModelFlagsTest, PrefixSharingCanBeSwitchedOff) {
  Give({"--model_root=models", "--model=tiny", "--noprefix_sharing"});
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelSettings model, ModelSettingsFromFlags());
  EXPECT_FALSE(model.prefix_sharing);
}

TEST_F(ModelFlagsTest, DevicesAreOnesOwn) {
  Give({"--backend=cuda", "--devices=3,0"});
  ISOBIT_ASSERT_OK_AND_ASSIGN(const BackendSettings backend, BackendSettingsFromFlags(2));
  EXPECT_EQ(backend.backend, BackendKind::kCuda);
  EXPECT_EQ(backend.devices, std::vector<int>({3, 0}));
  for (const char* bad : {"-1", "gpu0", "1.5", "99999999999"}) {
    Give({absl::StrCat("--devices=0,", bad)});
    EXPECT_THAT(BackendSettingsFromFlags(2).status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat("--devices names \"", bad, "\""))));
  }
  for (const char* bad : {"0", "0,1,2", "0,0"}) {
    Give({absl::StrCat("--devices=", bad)});
    EXPECT_THAT(BackendSettingsFromFlags(2).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("expected 2, one a rank")))
        << bad;
  }
}

TEST_F(ModelFlagsTest, RefusesWhatIsOutOfBounds) {
  const std::pair<const char*, const char*> kBad[] = {
      {"--model_root=", "--model_root is required"},
      {"--model=", "--model is required"},
      {"--load_format=gguf", "gguf"},
      {"--numerics=exact", "exact"},
      {"--max_context=-1", "--max_context is -1"},
      {"--max_batch_tokens=0", "--max_batch_tokens is 0"},
      {"--max_batch_tokens=16777217", "--max_batch_tokens is 16777217"},
      {"--backend=tpu", "--backend is \"tpu\", expected cpu or cuda"},
      {"--isa=mmx", "mmx"},
      {"--threads_per_rank=0", "--threads_per_rank is 0"},
      {"--threads_per_rank=257", "--threads_per_rank is 257"},
  };
  for (const auto& [flag, message] : kBad) {
    const absl::FlagSaver saver;
    Give({"--model_root=models", "--model=tiny", flag});
    absl::Status status = ModelSettingsFromFlags().status();
    if (status.ok()) status = BackendSettingsFromFlags(2).status();
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message))) << flag;
  }
}

}  // namespace
}  // namespace isobit
