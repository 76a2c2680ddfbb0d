// The limits that a rollout on GPUs chooses for itself.
#include "rollout/service/default_limits.h"

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tools/model_shapes.h"

namespace isobit {
namespace {

constexpr int64_t kGb = 1'000'000'000;

void ExpectLimits(const char* shape, int tensor_parallel_size, int64_t rank_bytes,
                  size_t max_running, int64_t max_batch_tokens, bool linear_twice = false) {
  SCOPED_TRACE(shape);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ModelConfig config, NamedModelShape(shape));
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const DefaultLimits limits,
      DefaultLimitsOf(config, tensor_parallel_size, rank_bytes, linear_twice));
  EXPECT_EQ(limits.max_running, max_running);
  EXPECT_EQ(limits.max_batch_tokens, max_batch_tokens);
}

TEST(DefaultLimitsTest, FollowFromWhatTheWeightsLeave) {
  // A token of 8B takes 147 KB on one rank, its weights 16.4 GB; 32B: 262 KB and 65.5 GB.
  ExpectLimits("qwen3-8b", 4, 135 * kGb, 512, 16384);
  ExpectLimits("qwen3-8b", 1, 135 * kGb, 256, 16384);
  ExpectLimits("qwen3-8b", 1, 70 * kGb, 128, 16384);
  ExpectLimits("qwen3-8b", 1, 20 * kGb, 8, 8192);
  ExpectLimits("qwen3-32b", 4, 135 * kGb, 512, 16384);
  ExpectLimits("qwen3-32b", 1, 70 * kGb, 8, 8192);
  ExpectLimits("qwen3-0.6b", 1, 135 * kGb, 512, 16384);
}

TEST(DefaultLimitsTest, AFastPathKeepsLinearLayersTwice) {
  // 15.1 GB more of 8B.
  ExpectLimits("qwen3-8b", 1, 60 * kGb, 128, 16384);
  ExpectLimits("qwen3-8b", 1, 60 * kGb, 64, 16384, /*linear_twice=*/true);
}

TEST(DefaultLimitsTest, OneSequenceEvenWhereNothingIsLeft) {
  ExpectLimits("qwen3-8b", 1, 10 * kGb, 1, 8192);
}

}  // namespace
}  // namespace isobit
