// What the C++ front's optimizer refuses, and that it then changes nothing. Its bits are compared
// in decoder_test.cc.
#include "trainer_bridge/front/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/support/status_matchers.h"
#include "tests/trainer_bridge/front/same_bits.h"
#include "trainer_bridge/front/ops.h"

namespace isobit::front {
namespace {

using testing_support::IsOk;

torch::Tensor Parameter(torch::IntArrayRef shape) {
  torch::manual_seed(shape[0]);
  torch::Tensor parameter = torch::randn(shape).to(torch::kBFloat16).requires_grad_();
  KeepFp32Gradient(parameter);
  parameter.mutable_grad() = torch::randn(shape);
  return parameter;
}

class OptimizerTest : public testing::Test {
 protected:
  NamedParameters parameters_ = {
      {"first", Parameter({3, 5})}, {"frozen", Parameter({2, 2})}, {"last", Parameter({7})}};
};

TEST_F(OptimizerTest, RefusesAGradientThatIsNotFinite) {
  parameters_[1].second.mutable_grad().reset();
  auto optimizer = AdamW::Create(parameters_, {.lr = 0.1});
  ASSERT_THAT(optimizer, IsOk());
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), infinity, -infinity}) {
    torch::Tensor& last = parameters_[2].second;
    last.mutable_grad()[4] = bad;
    std::vector<torch::Tensor> before;
    for (const auto& [name, parameter] : parameters_) before.push_back(parameter.detach().clone());
    const torch::Tensor gradient = parameters_[0].second.grad().clone();

    const absl::StatusOr<double> norm = ClipGradNorm(parameters_, 1e-3);
    EXPECT_EQ(norm.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(norm.status().message(), "the gradient of last holds NaN or infinity");
    EXPECT_EQ(optimizer->Step(), norm.status());

    for (size_t i = 0; i < parameters_.size(); ++i) {
      EXPECT_TRUE(SameBits(parameters_[i].second.detach(), before[i]));
      EXPECT_EQ(optimizer->state()[i].steps, 0);
    }
    EXPECT_TRUE(SameBits(parameters_[0].second.grad(), gradient));

    last.mutable_grad()[4] = 0.5f;  // control: with this one both are done
    ASSERT_THAT(ClipGradNorm(parameters_, 1e-3), IsOk());
    EXPECT_FALSE(SameBits(parameters_[0].second.grad(), gradient));
    last.mutable_grad()[4] = bad;
  }
  parameters_[2].second.mutable_grad()[4] = 0.5f;
  const torch::Tensor before = parameters_[0].second.detach().clone();
  ASSERT_THAT(optimizer->Step(), IsOk());
  EXPECT_FALSE(SameBits(parameters_[0].second.detach(), before));
  EXPECT_FALSE(parameters_[0].second.grad().defined());
  EXPECT_EQ(optimizer->state()[0].steps, 1);
  EXPECT_EQ(optimizer->state()[1].steps, 0);  // it has no gradient
}

// A norm of NaN is below nothing, and would clip nothing.
TEST_F(OptimizerTest, RefusesABoundThatClipsNothing) {
  for (const double bad : {std::nan(""), 0.0, -1.0}) {
    const absl::StatusOr<double> norm = ClipGradNorm(parameters_, bad);
    EXPECT_EQ(norm.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(norm.status().message()),
                testing::StartsWith("max_norm: expected above 0, got "));
  }
}

TEST_F(OptimizerTest, ContinuesFromItsState) {
  const auto step = [](NamedParameters& parameters, AdamW& optimizer, int seed) {
    torch::manual_seed(static_cast<uint64_t>(seed));
    for (auto& [name, p] : parameters) p.mutable_grad() = torch::randn(p.sizes());
    ASSERT_THAT(optimizer.Step(), IsOk());
  };
  auto whole = AdamW::Create(parameters_, {.lr = 0.1});
  ASSERT_THAT(whole, IsOk());
  step(parameters_, *whole, 1);
  NamedParameters copies;
  for (const auto& [name, p] : parameters_) copies.emplace_back(name, p.detach().clone());
  auto resumed = AdamW::Create(copies, {.lr = 0.1});
  auto without_state = AdamW::Create(copies, {.lr = 0.1});
  for (size_t i = 0; i < copies.size(); ++i) {
    const AdamW::State& s = whole->state()[i];
    resumed->state()[i] = {s.steps, s.master.clone(), s.m.clone(), s.v.clone()};
  }
  step(copies, *without_state, 2);
  const torch::Tensor control = copies[0].second.detach().clone();
  step(copies, *resumed, 2);
  step(parameters_, *whole, 2);
  for (size_t i = 0; i < copies.size(); ++i) {
    EXPECT_TRUE(SameBits(resumed->state()[i].master, whole->state()[i].master));
    EXPECT_TRUE(SameBits(copies[i].second, parameters_[i].second.detach()));
  }
  EXPECT_FALSE(SameBits(control, copies[0].second));
}

TEST_F(OptimizerTest, RefusesOptionsOutOfRange) {
  const auto message = [&](const AdamWOptions& options) {
    return std::string(AdamW::Create(parameters_, options).status().message());
  };
  const auto expected = [](absl::string_view got) {
    return absl::StrCat("lr, eps, weight_decay: expected a finite number of at least 0, got ", got);
  };
  EXPECT_EQ(message({.lr = -1}), expected("-1"));
  EXPECT_EQ(message({.lr = std::numeric_limits<double>::infinity()}), expected("inf"));
  EXPECT_EQ(message({.eps = std::numeric_limits<double>::infinity()}), expected("inf"));
  EXPECT_EQ(message({.weight_decay = std::nan("")}), expected("nan"));
  EXPECT_EQ(message({.beta2 = 1}), "betas: expected between 0 and 1, got 1");
  EXPECT_EQ(message({}), "");
}

}  // namespace
}  // namespace isobit::front
