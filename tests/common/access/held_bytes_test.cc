// Bounds on held bytes, of one client and of all.
#include "common/access/held_bytes.h"

#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::StatusIs;

std::shared_ptr<ByteBudget> Budget(size_t total, double share) {
  return std::make_shared<ByteBudget>("results", ByteLimits{.total = total, .client_share = share});
}

TEST(HeldBytesTest, BoundsEachClientAndAll) {
  const auto budget = Budget(100, 0.5);
  HeldBytes a = budget->Open("a");
  HeldBytes more_of_a = budget->Open("a");
  HeldBytes b = budget->Open("b");
  HeldBytes c = budget->Open("c");
  ISOBIT_EXPECT_OK(a.Resize(30));
  EXPECT_THAT(more_of_a.Resize(21),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("results: 21 bytes more"), HasSubstr("50 of one client"))));
  ISOBIT_EXPECT_OK(more_of_a.Resize(20));
  ISOBIT_EXPECT_OK(b.Resize(50));
  EXPECT_THAT(c.Resize(50),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("100 of all clients")));
  EXPECT_EQ(budget->held(), 100u) << "what is refused is not held";
  ISOBIT_EXPECT_OK(b.Resize(49));
  ISOBIT_EXPECT_OK(c.Resize(1));
  ISOBIT_EXPECT_OK(b.Resize(0));
  ISOBIT_EXPECT_OK(c.Resize(50)) << "what all clients' bound refused is not held by its client";
}

TEST(HeldBytesTest, OnlyWhatMayFitLaterComesWithARetryHint) {
  const auto budget = Budget(100, 0.5);
  HeldBytes first = budget->Open("a");
  HeldBytes second = budget->Open("a");
  ISOBIT_EXPECT_OK(first.Resize(20));
  const absl::Status later = second.Resize(50);
  EXPECT_THAT(later, StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_TRUE(RetryAfter(later).has_value());
  const absl::Status never = second.Resize(51);
  EXPECT_THAT(never, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("50 of one client")));
  EXPECT_FALSE(RetryAfter(never).has_value());
  ISOBIT_EXPECT_OK(second.Resize(30));
}

TEST(HeldBytesTest, GivesBackWhatIsDestroyed) {
  const auto budget = Budget(10, 1.0);
  {
    HeldBytes held = budget->Open("a");
    ISOBIT_EXPECT_OK(held.Resize(10));
    HeldBytes moved = std::move(held);
    EXPECT_EQ(budget->held(), 10u);
    moved = budget->Open("b");
  }
  EXPECT_EQ(budget->held(), 0u);
  HeldBytes again = budget->Open("a");
  ISOBIT_EXPECT_OK(again.Resize(10));
  ISOBIT_EXPECT_OK(HeldBytes().Resize(1000)) << "of no budget";
}

// Sanitizers judge, too.
TEST(HeldBytesTest, CountsFromManyThreads) {
  const auto budget = Budget(64, 0.5);
  std::latch start(4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&budget, &start, client = t % 2 == 0 ? "a" : "b"] {
      start.arrive_and_wait();
      for (size_t i = 0; i < 1000; ++i) {
        HeldBytes held = budget->Open(client);
        for (size_t n = 0; n < 1000; ++n) held.Resize(n * 7 % 40).IgnoreError();
        EXPECT_LE(budget->held(), 4 * 40u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget->held(), 0u);
}

}  // namespace
}  // namespace isobit
