// The isobit-bench binary of a build without CUDA, as a user runs it.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/tools/run_tool.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::Outcome;

Outcome RunBench(const std::string& arguments) {
  return testing_support::RunTool(ISOBIT_BENCH, arguments);
}

TEST(IsobitBenchTest, HelpNamesEverySubcommand) {
  const Outcome outcome = RunBench("--help");
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* name :
       {"cpu", "engine", "gemm", "attention", "ops", "allreduce", "decode", "score"}) {
    EXPECT_THAT(outcome.output, HasSubstr(std::string("\n") + name + " "));
  }
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
