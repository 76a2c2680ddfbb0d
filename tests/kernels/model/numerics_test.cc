// The fingerprint changes with what can change a bit, and with nothing else; mode names round-trip.
#include "kernels/model/numerics.h"

#include <string>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tools/model_shapes.h"

namespace isobit {
namespace {

using testing_support::StatusIs;

TEST(NumericsTest, FingerprintFollowsModeAndModel) {
  const ModelConfig config = *NamedModelShape("tiny-llama");
  const std::string fingerprint = FingerprintOf(config, NumericsMode::kTree);
  EXPECT_EQ(fingerprint.size(), 64u);
  EXPECT_EQ(FingerprintOf(config, NumericsMode::kTree), fingerprint);
  EXPECT_NE(FingerprintOf(config, NumericsMode::kBatchInvariant), fingerprint);
  EXPECT_NE(FingerprintOf(config, NumericsMode::kVanilla), fingerprint);
  ModelConfig other = config;
  other.rope_theta += 1;
  EXPECT_NE(FingerprintOf(other, NumericsMode::kTree), fingerprint);
  other = config;
  other.rms_norm_eps *= 2;
  EXPECT_NE(FingerprintOf(other, NumericsMode::kTree), fingerprint);
  other = config;
  other.max_position_embeddings *= 2;  // a limit, not a number that is computed with
  other.eos_token_ids = {5};
  EXPECT_EQ(FingerprintOf(other, NumericsMode::kTree), fingerprint);
}

TEST(NumericsTest, ModeNamesRoundTrip) {
  for (const NumericsMode mode :
       {NumericsMode::kTree, NumericsMode::kBatchInvariant, NumericsMode::kVanilla}) {
    EXPECT_EQ(*ParseNumericsMode(NumericsModeName(mode)), mode);
  }
  EXPECT_THAT(ParseNumericsMode("fast").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("got \"fast\"")));
}

TEST(NumericsTest, RopeTableScales) {
  ModelConfig config = *NamedModelShape("tiny-llama");
  const contract::RopeTable scaled = RopeTableOf(config, 8);
  EXPECT_EQ(scaled.cosine.size(), size_t{8} * 8);
  config.rope_scaling = {};
  EXPECT_NE(RopeTableOf(config, 8).sine, scaled.sine);
}

}  // namespace
}  // namespace isobit
