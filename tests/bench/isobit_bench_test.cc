// The isobit-bench binary of a build without CUDA, as a user runs it.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/tools/run_tool.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing_support::Outcome;

Outcome RunBench(const std::string& arguments) {
  return testing_support::RunTool(ISOBIT_BENCH, arguments);
}

TEST(IsobitBenchTest, HelpNamesEverySubcommand) {
  const Outcome outcome = RunBench("--help");
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* name :
       {"cpu", "engine", "metrics", "gemm", "attention", "ops", "allreduce", "decode", "score"}) {
    EXPECT_THAT(outcome.output, HasSubstr(std::string("\n") + name + " "));
  }
}

TEST(IsobitBenchTest, MetricsPrintsARowForEachLoad) {
  const Outcome outcome =
      RunBench("metrics --metrics_rounds=2 --metrics_steps=2 --metrics_model=tiny-qwen3");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* running : {"1", "8", "64"}) {
    EXPECT_THAT(outcome.output,
                ContainsRegex(std::string("\n +") + running + " +[0-9.]+ +-?[0-9.]+"));
  }
  EXPECT_EQ(RunBench("metrics --metrics_rounds=0").exit_code, 2);
}

TEST(IsobitBenchTest, WhatNeedsAGpuSaysThatItIsMissing) {
  for (const char* name : {"gemm", "attention --quick", "ops", "allreduce", "decode", "score"}) {
    const Outcome outcome = RunBench(name);
    EXPECT_EQ(outcome.exit_code, 1) << name;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("without CUDA")));
  }
}

TEST(IsobitBenchTest, RefusesWhatItDoesNotKnow) {
  for (const char* arguments : {"", "gpu", "cpu --isa=mmx", "cpu --threads=0.5", "cpu --quick"}) {
    EXPECT_EQ(RunBench(arguments).exit_code, 2) << arguments;
  }
}

}  // namespace
}  // namespace isobit
