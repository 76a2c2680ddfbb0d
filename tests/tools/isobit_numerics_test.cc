// The program isobit-numerics, as a user runs it, on cards that cpu_mma_device.cc plays.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/tools/run_tool.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::Outcome;

Outcome RunOn(const std::string& cards, const std::string& flags = "") {
  return testing_support::RunTool("CPU_CARDS=" + cards + " " + ISOBIT_NUMERICS, flags);
}

TEST(IsobitNumericsTest, AMillionStepsOfACardThatComputesTheContract) {
  const Outcome outcome = RunOn("hopper,hopper", "--json");
  EXPECT_EQ(outcome.exit_code, 0);
  const auto report = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(report["computes_contract"], true);
  ASSERT_EQ(report["devices"].size(), 2u);
  for (const auto& device : report["devices"]) {
    EXPECT_EQ(device["computes_contract"], true);
    ASSERT_EQ(device["instructions"].size(), 2u);
    for (const auto& one : device["instructions"]) {
      EXPECT_GE(one["steps"], 1000000);
      EXPECT_EQ(one["different"], 0);
      EXPECT_FALSE(one.contains("first"));
    }
  }
  EXPECT_THAT(RunOn("hopper", "--steps=1").output,
              HasSubstr("GPU 0, hopper, compute capability 9.0: computes the contract (C1)"));
}

TEST(IsobitNumericsTest, OneWrongBitIsNamed) {
  const Outcome outcome = RunOn("hopper,wrong", "--json --steps=100000");
  EXPECT_EQ(outcome.exit_code, 1);
  const auto report = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(report["computes_contract"], false);
  EXPECT_EQ(report["devices"][0]["computes_contract"], true);
  const auto& wrong = report["devices"][1];
  EXPECT_EQ(wrong["computes_contract"], false);
  EXPECT_EQ(wrong["instructions"][0]["different"], 0);
  EXPECT_EQ(wrong["instructions"][1]["different"], 1);
  EXPECT_EQ(wrong["instructions"][1]["families"]["every exponent"]["different"], 1);
  EXPECT_EQ(wrong["instructions"][1]["first"]["step"], 5000);
  EXPECT_THAT(RunOn("wrong", "--steps=100000").output,
              AllOf(HasSubstr("does NOT compute the contract"), HasSubstr("every exponent: 1 of"),
                    HasSubstr("first: c ")));
}

TEST(IsobitNumericsTest, AnotherTensorCoreIsToldApart) {
  const Outcome outcome = RunOn("ampere", "--json --steps=100000");
  EXPECT_EQ(outcome.exit_code, 1);
  const auto report = nlohmann::json::parse(outcome.output);
  ASSERT_EQ(report["devices"][0]["instructions"].size(), 1u);  // no wgmma
  EXPECT_GT(report["devices"][0]["instructions"][0]["different"], 1000);
}

TEST(IsobitNumericsTest, WhereItCannotRunItSaysWhy) {
  const Outcome none = RunOn("");
  EXPECT_EQ(none.exit_code, 3);
  EXPECT_THAT(none.output, HasSubstr("isobit-numerics: no NVIDIA GPU on this machine"));
  const Outcome broken = RunOn("hopper,broken", "--json --steps=1");
  EXPECT_EQ(broken.exit_code, 3);
  EXPECT_EQ(nlohmann::json::parse(broken.output)["error"], "GPU 1, broken: the driver fails");
  const Outcome no_driver =
      testing_support::RunTool(std::string("env -u CPU_CARDS ") + ISOBIT_NUMERICS, "");
  EXPECT_EQ(no_driver.exit_code, 3);
  EXPECT_EQ(RunOn("hopper", "--steps=0").exit_code, 2);
  EXPECT_EQ(RunOn("hopper", "--step=1").exit_code, 2);
}

}  // namespace
}  // namespace isobit
