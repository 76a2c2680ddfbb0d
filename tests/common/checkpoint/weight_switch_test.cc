// The rules of a weight update: which versions it may have, and when its weights come to serve.
#include "common/checkpoint/weight_switch.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

class WeightSwitchTest : public testing::Test {
 protected:
  // Weights whose swap is counted, and answers `swapped_`.
  PreparedUpdate Prepared() {
    return {.digest = "new", .swap = [this](WeightUpdateResult& result) {
              EXPECT_TRUE(is_quiet_) << "swapped while the old weights are in use";
              ++num_swaps_;
              result.num_recomputed = 3;
              return swapped_;
            }};
  }
  void BeginAndPrepare(const WeightUpdate& update) {
    ISOBIT_ASSERT_OK(switch_.Begin(update, present_));
    EXPECT_TRUE(switch_.is_preparing());
    EXPECT_FALSE(switch_.is_waiting());
    EXPECT_FALSE(Settle().has_value()) << "before anything is prepared";
    switch_.SetPrepared(Prepared());
    EXPECT_FALSE(switch_.is_preparing());
    EXPECT_TRUE(switch_.is_waiting());
  }
  std::optional<FinishedUpdate> Settle(const absl::Status& available = absl::OkStatus()) {
    return switch_.Settle(
        available, [this](const WeightUpdate&, WeightUpdateResult& result) -> absl::StatusOr<bool> {
          ++result.num_aborted;
          if (!quiescence_.ok()) return quiescence_;
          return is_quiet_;
        });
  }
  void ExpectEnded(const std::optional<FinishedUpdate>& finished, absl::StatusCode code,
                   const std::string& text) {
    ASSERT_TRUE(finished.has_value());
    EXPECT_THAT(finished->result, StatusIs(code, HasSubstr(text)));
    EXPECT_EQ(num_swaps_, 0);
    EXPECT_FALSE(switch_.is_waiting());
    ISOBIT_EXPECT_OK(switch_.Begin({.model_path = "m"}, present_)) << "nothing is left of it";
  }

  const WeightVersion present_ = {.id = 7, .digest = "old"};
  WeightSwitch switch_;
  bool is_quiet_ = true;
  absl::Status quiescence_, swapped_;
  int num_swaps_ = 0;
};

TEST_F(WeightSwitchTest, PreparesQuiescesAndSwaps) {
  BeginAndPrepare({.model_path = "m"});
  is_quiet_ = false;
  EXPECT_FALSE(Settle().has_value());
  EXPECT_FALSE(Settle().has_value());
  EXPECT_TRUE(switch_.is_waiting());
  EXPECT_EQ(num_swaps_, 0);
  is_quiet_ = true;
  const std::optional<FinishedUpdate> finished = Settle();
  ASSERT_TRUE(finished.has_value());
  ISOBIT_ASSERT_OK(finished->result);
  EXPECT_EQ(finished->result->previous.id, 7u);
  EXPECT_EQ(finished->result->previous.digest, "old");
  EXPECT_EQ(finished->result->current.id, 8u);
  EXPECT_EQ(finished->result->current.digest, "new");
  EXPECT_EQ(finished->result->num_aborted, 3u) << "counted over all that was asked";
  EXPECT_EQ(finished->result->num_recomputed, 3u);
  EXPECT_EQ(num_swaps_, 1);
  EXPECT_FALSE(Settle().has_value());
  EXPECT_EQ(num_swaps_, 1);
}

TEST_F(WeightSwitchTest, AVersionIsGreaterThanThePresentOne) {
  constexpr uint64_t kLast = std::numeric_limits<uint64_t>::max();
  const auto begin = [](std::optional<uint64_t> version, uint64_t present) {
    WeightSwitch fresh;
    return fresh.Begin({.model_path = "m", .weight_version = version},
                       {.id = present, .digest = ""});
  };
  EXPECT_EQ(*begin(std::nullopt, 0), 1u);
  EXPECT_EQ(*begin(std::nullopt, 7), 8u);
  EXPECT_EQ(*begin(40, 7), 40u);
  constexpr uint64_t kLastGiven = kLast / 2;
  EXPECT_EQ(*begin(kLastGiven, 7), kLastGiven);
  EXPECT_EQ(*begin(std::nullopt, kLastGiven), kLastGiven + 1) << "there is always a next one";
  for (const uint64_t given : {kLastGiven + 1, kLast - 1, kLast}) {
    EXPECT_THAT(begin(given, 7), StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr("weight_version: expected at most 922337203")));
  }
  for (const uint64_t old : {0, 6, 7}) {
    EXPECT_THAT(begin(old, 7),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("weight_version: expected more than 7, the present one, got ")));
  }
  EXPECT_THAT(begin(std::nullopt, kLast), StatusIs(absl::StatusCode::kInvalidArgument))
      << "there is no next one";
}

TEST_F(WeightSwitchTest, OneUpdateAtATime) {
  const auto refused = StatusIs(absl::StatusCode::kAborted, HasSubstr("in progress"));
  BeginAndPrepare({.model_path = "m"});
  EXPECT_THAT(switch_.Begin({.model_path = "n"}, present_), refused);
  EXPECT_THAT(switch_.Begin({.model_path = "n", .weight_version = 1}, present_), refused)
      << "which version is the present one is not known yet";
  is_quiet_ = false;
  EXPECT_FALSE(Settle().has_value());
  EXPECT_THAT(switch_.Begin({.model_path = "n"}, present_), refused);
}

TEST_F(WeightSwitchTest, AnErrorOfThePreparationEndsIt) {
  ISOBIT_ASSERT_OK(switch_.Begin({.model_path = "m"}, present_));
  switch_.SetPrepared(absl::NotFoundError("no such model"));
  ExpectEnded(Settle(absl::UnavailableError("draining")), absl::StatusCode::kNotFound,
              "no such model");
}

TEST_F(WeightSwitchTest, AnOwnerThatCannotServeEndsIt) {
  BeginAndPrepare({.model_path = "m"});
  ExpectEnded(Settle(absl::UnavailableError("draining")), absl::StatusCode::kUnavailable,
              "draining");
}

TEST_F(WeightSwitchTest, AnErrorOfTheQuiescenceEndsIt) {
  BeginAndPrepare({.model_path = "m"});
  quiescence_ = absl::FailedPreconditionError("paused");
  ExpectEnded(Settle(), absl::StatusCode::kFailedPrecondition, "paused");
}

TEST_F(WeightSwitchTest, ACallerThatHasGoneEndsItUntilTheSwap) {
  bool gone = false;
  BeginAndPrepare({.model_path = "m", .is_abandoned = [&] { return gone; }});
  is_quiet_ = false;
  EXPECT_FALSE(Settle().has_value());
  gone = is_quiet_ = true;
  ExpectEnded(Settle(), absl::StatusCode::kCancelled, "the caller of the weight update has gone");
}

TEST_F(WeightSwitchTest, AnErrorOfTheSwapIsReported) {
  BeginAndPrepare({.model_path = "m"});
  swapped_ = absl::InternalError("device lost");
  const std::optional<FinishedUpdate> finished = Settle();
  ASSERT_TRUE(finished.has_value());
  EXPECT_THAT(finished->result, StatusIs(absl::StatusCode::kInternal, HasSubstr("device lost")));
  EXPECT_EQ(num_swaps_, 1);
}

}  // namespace
}  // namespace isobit
