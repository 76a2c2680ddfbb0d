// Ops on a stream that lacks the card or the scratch which they need. Needs no GPU: they fail
// before they call CUDA.
#include <array>
#include <cstddef>
#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/common/device/device_sequences.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/attention/attention.h"
#include "kernels/cuda/sm90/device/card.h"
#include "kernels/cuda/sm90/log_probs/log_probs.h"
#include "kernels/ops/all.h"
#include "tests/support/status_matchers.h"

namespace isobit::cuda {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

const auto kNoCard = StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("has no card"));
const auto kNoScratch =
    StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("has no scratch"));

StackedWeight Weight() { return {.rows = {64}, .columns = 64}; }

TEST(StreamTest, LinearLayersNeedACard) {
  EXPECT_THAT(cuda::Run(LinearArgs{.ldx = 64, .m = 1, .weight = {.shape = {.n = 64, .k = 64}}}, {}),
              kNoCard);
  EXPECT_THAT(cuda::Run(
                  StackedLinearArgs{
                      .ldx = 64, .m = 1, .weight = Weight(), .leaves = contract::PlanColumns(64)},
                  {}),
              kNoCard);
  EXPECT_THAT(cuda::Run(InputGradientArgs{.lddy = 64, .m = 1, .weight = Weight()}, {}), kNoCard);
  constexpr std::array<int64_t, 2> kBounds = {0, 64};
  const WeightGradientArgs weight_gradient{nullptr, 64, nullptr, 64, kBounds, 1, {64}, 64};
  EXPECT_THAT(cuda::Run(weight_gradient, {}), kNoCard);
}

TEST(StreamTest, AttentionNeedsACard) {
  DeviceSequences sequences{
      .num_sequences = 1, .num_rows = 1, .min_rows = 1, .max_rows = 1, .max_positions = 1};
  AttentionArgs args{.heads = 1,
                     .sequences = {.host = {}, .device = &sequences},
                     .kv = {.page_size = 16, .kv_heads = 1, .head_dim = 40}};
  const AttentionWorkspace workspace{.bytes = size_t{1} << 30};
  EXPECT_THAT(LaunchAttention(args, workspace, {}), kNoCard);
  // Of this head dimension, sequences of many rows take the walk over all splits.
  sequences.num_rows = sequences.min_rows = sequences.max_rows = sequences.max_positions = 4096;
  EXPECT_THAT(LaunchAttention(args, workspace, {}), kNoCard);
  EXPECT_THAT(cuda::Run(AttentionGradientArgs{}, {}), kNoCard);
}

TEST(StreamTest, LogProbsNeedACard) {
  EXPECT_THAT(LaunchRangeResults({.num_rows = 1, .vocab = 64}, {}, nullptr, {}), kNoCard);
}

TEST(StreamTest, AttentionsGradientNeedsScratch) {
  EXPECT_THAT(cuda::Run(AttentionGradientArgs{}, {.card = &kH200}), kNoScratch);
}

}  // namespace
}  // namespace isobit::cuda
