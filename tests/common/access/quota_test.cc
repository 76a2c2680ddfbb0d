// What clients may hold, each and together, and that a lease gives back what it took.
#include "common/access/quota.h"

#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

constexpr QuotaAmounts kEach = {.requests = 3, .streams = 2, .tokens = 100};
constexpr QuotaAmounts kAll = {.requests = 4, .streams = 4, .tokens = 400};

TEST(QuotaTest, BoundsEachKindForEachClient) {
  const auto quota = Quota::Create(kEach, kAll);
  const QuotaAmounts fits[] = {{.requests = 3}, {.streams = 2}, {.tokens = 100}};
  const QuotaAmounts more[] = {{.requests = 1}, {.streams = 1}, {.tokens = 1}};
  const char* const names[] = {"requests", "streams", "tokens"};
  for (int i = 0; i < 3; ++i) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const Quota::Lease lease, quota->Take("a", fits[i]));
    const auto refused = quota->Take("a", more[i]);
    EXPECT_THAT(refused, StatusIs(kExhausted, HasSubstr(names[i])));
    EXPECT_TRUE(RetryAfter(refused.status()).has_value());
    ISOBIT_EXPECT_OK(quota->Take("b", more[i]));
  }
  EXPECT_EQ(quota->num_clients(), 0u);
}

TEST(QuotaTest, BoundsAllClientsTogether) {
  const auto quota = Quota::Create(kEach, kAll);
  ISOBIT_ASSERT_OK_AND_ASSIGN(Quota::Lease a, quota->Take("a", {.requests = 3}));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Quota::Lease b, quota->Take("b", {.requests = 1}));
  EXPECT_THAT(quota->Take("c", {.requests = 1}), StatusIs(kExhausted, HasSubstr("all clients")));
  a = Quota::Lease();
  ISOBIT_EXPECT_OK(quota->Take("c", {.requests = 1}));
}

TEST(QuotaTest, ACallThatCanNeverFitGetsNoRetryHint) {
  const auto quota = Quota::Create(kEach, kAll);
  const auto refused = quota->Take("a", {.tokens = 101});
  EXPECT_THAT(refused, StatusIs(kExhausted, HasSubstr("101 tokens, expected at most 100")));
  EXPECT_FALSE(RetryAfter(refused.status()).has_value());
}

TEST(QuotaTest, ARefusedCallHoldsNothing) {
  const auto quota = Quota::Create(kEach, kAll);
  EXPECT_FALSE(quota->Take("a", {.requests = 1, .streams = 1, .tokens = 101}).ok());
  EXPECT_EQ(quota->num_clients(), 0u);
  ISOBIT_EXPECT_OK(quota->Take("a", kEach));
}

TEST(QuotaTest, NumbersNearTheEndOfTheirRangeDoNotWrap) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto quota = Quota::Create({.tokens = kMost}, {.tokens = kMost});
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Quota::Lease lease, quota->Take("a", {.tokens = kMost}));
  EXPECT_THAT(quota->Take("a", {.tokens = kMost}), StatusIs(kExhausted));
}

TEST(QuotaTest, MovedLeasesGiveBackOnceAndMayOutliveTheirOwner) {
  auto quota = Quota::Create(kEach, kAll);
  ISOBIT_ASSERT_OK_AND_ASSIGN(Quota::Lease first, quota->Take("a", {.requests = 3}));
  Quota::Lease second = std::move(first);
  first = Quota::Lease();
  EXPECT_THAT(quota->Take("a", {.requests = 1}), StatusIs(kExhausted));
  std::weak_ptr<Quota> alive = quota;
  quota = nullptr;
  EXPECT_FALSE(alive.expired());
  second = Quota::Lease();
  EXPECT_TRUE(alive.expired());
}

TEST(QuotaTest, ThreadsLeaveNothingBehind) {
  const auto quota = Quota::Create(kEach, kAll);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&quota, i] {
      for (int j = 0; j < 2000; ++j) {
        (void)quota->Take(std::to_string((i + j) % 3), {.requests = 1, .tokens = 60});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(quota->num_clients(), 0u);
  ISOBIT_EXPECT_OK(quota->Take("a", kEach));
}

}  // namespace
}  // namespace isobit
