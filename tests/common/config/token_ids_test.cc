// Token ids from the wire: what is let through, and what messages say of the rest.
#include "common/config/token_ids.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "common/config/sampling_params.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

TEST(TokenIdsTest, OnesOfTheVocabularyPass) {
  const std::vector<int32_t> ids = TokenIdsFromWire(std::vector<uint32_t>{0, 7, 99});
  EXPECT_EQ(ids, std::vector<int32_t>({0, 7, 99}));
  ISOBIT_EXPECT_OK(CheckTokenIds("ids", ids, 100));
  ISOBIT_EXPECT_OK(CheckTokenIds("ids", {}, 100));
}

TEST(TokenIdsTest, OthersAreNamedAsTheyWereSent) {
  for (const uint32_t bad : {uint32_t{100}, uint32_t{1} << 31, (uint32_t{1} << 31) + 7,
                             std::numeric_limits<uint32_t>::max()}) {
    const std::vector<int32_t> ids = TokenIdsFromWire(std::vector<uint32_t>{3, bad, 200});
    EXPECT_THAT(CheckTokenIds("ids", ids, 100),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         absl::StrCat("ids[1]: expected a token id in [0, 100), got ", bad)));
  }
  // No vocabulary is so large that an id above 2^31 - 1 lies in it.
  EXPECT_FALSE(CheckTokenId("id", -1, std::numeric_limits<int32_t>::max()).ok());
}

TEST(TokenIdsTest, StopTokensAndBiasesKeepTheSameRule) {
  const SamplingLimits limits = {.vocab_size = 100};
  SamplingParams params;
  params.stop_token_ids = TokenIdsFromWire(std::vector<uint32_t>{5, 4294967295u});
  EXPECT_THAT(ValidateSamplingParams(params, limits),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("sampling.stop_token_ids[1]: expected a token id in [0, 100), got "
                                 "4294967295")));
  params.stop_token_ids = {};
  params.logit_bias = {{100, 1.0f}};
  EXPECT_THAT(ValidateSamplingParams(params, limits),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("got 100")));
}

}  // namespace
}  // namespace isobit
