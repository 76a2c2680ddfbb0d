// Command lines of services: what is accepted, and that nothing else is.
#include "common/config/flags.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "common/config/flag_hints.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

ABSL_FLAG(int32_t, test_ranks, 4, "Number of ranks.");
ABSL_FLAG(bool, test_drain, true, "Whether to drain.");
ABSL_FLAG(std::string, test_root, "", "Directory of models.");

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

absl::StatusOr<bool> Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "service");
  return ParseFlags(static_cast<int>(arguments.size()), arguments.data());
}

TEST(ParseFlagsTest, TakesEveryForm) {
  const absl::FlagSaver saver;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const bool help,
                              Parse({"--test_ranks=8", "--test_root", "models", "--notest_drain"}));
  EXPECT_FALSE(help);
  EXPECT_EQ(absl::GetFlag(FLAGS_test_ranks), 8);
  EXPECT_EQ(absl::GetFlag(FLAGS_test_root), "models");
  EXPECT_FALSE(absl::GetFlag(FLAGS_test_drain));
  ISOBIT_ASSERT_OK(Parse({"--test_drain", "--test_root="}));
  EXPECT_TRUE(absl::GetFlag(FLAGS_test_drain));
  EXPECT_EQ(absl::GetFlag(FLAGS_test_root), "");
  ISOBIT_ASSERT_OK(Parse({"--test_drain=false", "--test_root=a=b"}));
  EXPECT_FALSE(absl::GetFlag(FLAGS_test_drain));
  EXPECT_EQ(absl::GetFlag(FLAGS_test_root), "a=b");
}

TEST(ParseFlagsTest, RejectsEverythingElse) {
  const absl::FlagSaver saver;
  const struct {
    std::vector<const char*> arguments;
    const char* message;
  } kCases[] = {
      {{"--test_rank=8"}, "unknown flag --test_rank; did you mean --test_ranks?"},
      {{"--test-ranks", "8"}, "unknown flag --test-ranks; did you mean --test_ranks?"},
      {{"-test-ranks=8"}, "expected --flag=value; did you mean --test_ranks?"},
      {{"--no_test_drain"}, "unknown flag --no_test_drain; did you mean --notest_drain?"},
      {{"--notest_ranks"}, "unknown flag --notest_ranks"},
      {{"--notest_drain=true"}, "unknown flag --notest_drain"},
      {{"--test_ranks=eight"}, "eight"},
      {{"--test_ranks=99999999999"}, "99999999999"},
      {{"--test_ranks"}, "flag --test_ranks lacks a value"},
      {{"models"}, "unexpected argument \"models\""},
      {{"-test_ranks=8"}, "unexpected argument \"-test_ranks=8\""},
      {{"--"}, "unexpected argument \"--\""},
      {{"--=3"}, "unknown flag --"},
  };
  for (const auto& test : kCases) {
    EXPECT_THAT(Parse(test.arguments),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(test.message)));
  }
}

TEST(ParseFlagsTest, HelpListsFlagsWithDefaults) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const bool help, Parse({"--nonsense", "--help"}));
  EXPECT_TRUE(help);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const bool short_help, Parse({"-h"}));
  EXPECT_TRUE(short_help);
  EXPECT_THAT(FlagsHelp(), HasSubstr("--test_ranks (default 4)\n      Number of ranks.\n"));
}

TEST(ParseFlagsDeathTest, UnknownFlagExits2AndHelpExits0) {
  const char* const unknown[] = {"service", "--bogus"};
  EXPECT_EXIT(ParseFlagsOrExit(2, unknown, "usage"), testing::ExitedWithCode(2),
              "service: unknown flag --bogus");
  const char* const help[] = {"service", "--help"};
  EXPECT_EXIT(ParseFlagsOrExit(2, help, "usage"), testing::ExitedWithCode(0), "");
  const char* const version[] = {"service", "--version"};
  EXPECT_EXIT(ParseFlagsOrExit(2, version, "usage"), testing::ExitedWithCode(0), "");
  EXPECT_THAT(VersionOf("bin/service"), testing::MatchesRegex("service [0-9]+[.][0-9]+[.][0-9]+"));
}

TEST(FlagHintTest, KnowsOtherSystemsAndMisspeltNames) {
  const std::vector<std::string> known = {
      "backend",   "cuda_graphs", "gpu_memory_fraction", "max_running", "max_waiting", "port",
      "port_file", "tp_size",     "prefix_sharing",      "max_context", "model",       "tls_cert"};
  const struct {
    const char* name;
    const char* meant;
  } kCases[] = {{"tensor-parallel-size", "tp_size"},
                {"tensor_parallel_size", "tp_size"},
                {"tp-size", "tp_size"},
                {"TP_SIZE", "tp_size"},
                {"gpu-memory-utilization", "gpu_memory_fraction"},
                {"mem-fraction-static", "gpu_memory_fraction"},
                {"max-num-seqs", "max_running"},
                {"max-model-len", "max_context"},
                {"ssl-certfile", "tls_cert"},
                {"enforce-eager", "nocuda_graphs"},
                {"no-enable-prefix-caching", "noprefix_sharing"},
                {"max_runing", "max_running"},
                {"port_fiel", "port_file"},
                {"prot", "port"},
                {"modle", "model"}};
  for (const auto& test : kCases) {
    EXPECT_EQ(FlagHint(test.name, known), absl::StrCat("; did you mean --", test.meant, "?"));
  }
  const std::string long_name(10'000, 'x');
  for (const char* name : {"", "x", "bogus", "trust-remote-code", long_name.c_str()}) {
    EXPECT_EQ(FlagHint(name, known), "") << name;
  }
  EXPECT_EQ(FlagHint("tensor-parallel-size", {"shards"}), "; did you mean --shards?");
}

TEST(RequireInRangeTest, NamesFlagValueAndBounds) {
  ISOBIT_EXPECT_OK(RequireInRange("tp", 8, 1, 8));
  EXPECT_THAT(RequireInRange("tp", int64_t{9}, 1, 8),
              StatusIs(absl::StatusCode::kInvalidArgument, "--tp is 9, expected 1 to 8"));
  EXPECT_THAT(RequireInRange("f", std::numeric_limits<double>::quiet_NaN(), 0, 1),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace isobit
