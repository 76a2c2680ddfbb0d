// Which sequences run when, and what becomes of KV pages: the scheduler without a model.
#include "rollout/scheduler.h"

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::unique_ptr<Request> MakeRequest(size_t num_prompt, uint32_t max_tokens, uint32_t n = 1) {
  GenerationRequest request;
  request.prompt.assign(num_prompt, 7);
  request.sampling.max_tokens = max_tokens;
  request.sampling.n = n;
  return std::make_unique<Request>(request, 0, absl::Span<const int32_t>(), nullptr);
}

// A scheduler over a few pages of four tokens, and a stand-in for the model.
class SchedulerTest : public testing::Test {
 protected:
  void SetUpScheduler(int32_t num_pages, size_t max_running = 8, int64_t max_batch_tokens = 1000) {
    pages_ = std::make_unique<KvPages>(num_pages, 4);
    scheduler_ = std::make_unique<Scheduler>(
        SchedulerLimits{.max_running = max_running, .max_batch_tokens = max_batch_tokens}, *pages_);
  }

  Sequence& Add(size_t num_prompt, uint32_t max_tokens = 100) {
    requests_.push_back(MakeRequest(num_prompt, max_tokens));
    scheduler_->Add(*requests_.back()->samples[0]);
    return *requests_.back()->samples[0];
  }

  // Schedules and does what the engine does with a batch: each sequence gets one token.
  std::vector<Sequence*> Step() {
    std::vector<Sequence*> batch = scheduler_->Schedule();
    for (Sequence* sequence : batch) {
      sequence->num_cached = static_cast<int64_t>(sequence->tokens.size());
      sequence->tokens.push_back(9);
    }
    return batch;
  }

  std::unique_ptr<KvPages> pages_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(SchedulerTest, PrefillsWholePromptsBesideDecodes) {
  SetUpScheduler(100);
  Sequence& a = Add(10);
  EXPECT_THAT(Step(), ElementsAre(&a));
  EXPECT_EQ(a.pages.size(), 3u);
  Sequence& b = Add(5);
  const std::vector<Sequence*> batch = scheduler_->Schedule();
  EXPECT_THAT(batch, ElementsAre(&a, &b));
  EXPECT_EQ(a.tokens.size() - static_cast<size_t>(a.num_cached), 1u);
  EXPECT_EQ(b.num_cached, 0);
}

TEST_F(SchedulerTest, KeepsTheTokenBudgetOfAStep) {
  SetUpScheduler(100, 8, 20);
  Sequence& a = Add(12);
  Sequence& b = Add(9);  // 21 tokens together
  Sequence& c = Add(1);  // would fit, but may not overtake b
  EXPECT_THAT(Step(), ElementsAre(&a));
  EXPECT_THAT(Step(), ElementsAre(&a, &b, &c));  // 1 + 9 + 1
}

TEST_F(SchedulerTest, CountsDecodesInTheTokenBudget) {
  SetUpScheduler(100, 8, 10);
  Sequence& a = Add(4);
  EXPECT_THAT(Step(), ElementsAre(&a));
  Sequence& b = Add(10);
  EXPECT_THAT(Step(), ElementsAre(&a));
  scheduler_->Remove(a);
  EXPECT_THAT(Step(), ElementsAre(&b));
}

TEST_F(SchedulerTest, KeepsTheSequenceBudgetOfAStep) {
  SetUpScheduler(100, 2);
  Sequence& a = Add(1);
  Sequence& b = Add(1);
  Sequence& c = Add(1);
  EXPECT_THAT(Step(), ElementsAre(&a, &b));
  scheduler_->Remove(a);
  EXPECT_THAT(Step(), ElementsAre(&b, &c));
}

TEST_F(SchedulerTest, DoesNotOvertakeTheHeadThatWaitsForPages) {
  SetUpScheduler(4);
  Sequence& a = Add(8);
  Sequence& big = Add(12);
  Sequence& small = Add(1);
  EXPECT_THAT(Step(), ElementsAre(&a));
  EXPECT_EQ(pages_->num_free(), 2);
  scheduler_->Remove(a);
  EXPECT_THAT(Step(), ElementsAre(&big, &small));
}

TEST_F(SchedulerTest, PreemptsTheLatestAndRecomputesItFirst) {
  SetUpScheduler(4);
  Sequence& a = Add(4);
  Sequence& b = Add(4);
  Sequence& c = Add(4);
  EXPECT_THAT(Step(), ElementsAre(&a, &b, &c));  // 3 pages full
  Sequence& newcomer = Add(1);
  // a takes the last page; b and c need one each: c gives way.
  EXPECT_THAT(Step(), ElementsAre(&a, &b));
  EXPECT_EQ(c.num_preemptions, 1u);
  EXPECT_EQ(c.state, Sequence::State::kWaiting);
  EXPECT_THAT(c.pages, IsEmpty());
  EXPECT_EQ(c.num_cached, 0);
  EXPECT_EQ(c.tokens.size(), 5u) << "what it generated is its prompt now";
  EXPECT_EQ(newcomer.state, Sequence::State::kWaiting);
  scheduler_->Remove(a);
  EXPECT_THAT(Step(), ElementsAre(&b, &c)) << "c before the newcomer, for which no page is left";
  EXPECT_EQ(c.num_cached, 5);
}

TEST_F(SchedulerTest, PreemptsSeveralKeepingTheirOrder) {
  SetUpScheduler(4);
  Sequence& a = Add(4);
  Sequence& b = Add(4);
  Sequence& c = Add(4);
  Sequence& d = Add(4);
  EXPECT_THAT(Step(), ElementsAre(&a, &b, &c, &d));
  EXPECT_THAT(Step(), ElementsAre(&a, &b)) << "d's page to a, c's to b";
  scheduler_->Remove(a);
  EXPECT_THAT(Step(), ElementsAre(&b, &c));
  scheduler_->Remove(b);
  EXPECT_THAT(Step(), ElementsAre(&c, &d));
}

TEST_F(SchedulerTest, PreemptAllKeepsOrderAndFreesEveryPage) {
  SetUpScheduler(20);
  Sequence& a = Add(4);
  Sequence& b = Add(4);
  EXPECT_THAT(Step(), ElementsAre(&a, &b));
  Sequence& c = Add(4);
  scheduler_->PreemptAll();
  EXPECT_EQ(pages_->num_free(), 20);
  EXPECT_EQ(a.num_cached, 0);
  EXPECT_EQ(a.num_preemptions, 0u) << "it was not for want of pages";
  EXPECT_THAT(Step(), ElementsAre(&a, &b, &c));
}

TEST_F(SchedulerTest, HoldsNewcomersBackUntilReleased) {
  SetUpScheduler(4);
  Sequence& a = Add(4);
  Sequence& b = Add(13);  // waits for a's page
  EXPECT_THAT(Step(), ElementsAre(&a));
  scheduler_->HoldNewcomers();
  Sequence& late = Add(1);
  scheduler_->HoldNewcomers();  // the first hold counts
  EXPECT_TRUE(scheduler_->HasWork());
  scheduler_->Remove(a);
  EXPECT_THAT(Step(), ElementsAre(&b));
  scheduler_->Remove(b);
  EXPECT_FALSE(scheduler_->HasWork());
  EXPECT_THAT(Step(), IsEmpty());
  scheduler_->ReleaseNewcomers();
  EXPECT_TRUE(scheduler_->HasWork());
  EXPECT_THAT(Step(), ElementsAre(&late));
}

TEST_F(SchedulerTest, CountsWaitingRequestsNotSequences) {
  SetUpScheduler(100, 2);
  requests_.push_back(MakeRequest(5, 10, /*n=*/3));
  for (const auto& sequence : requests_[0]->samples) scheduler_->Add(*sequence);
  Add(7);
  EXPECT_EQ(scheduler_->num_waiting_requests(), 2u);
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 3 * 5 + 7);
  Step();
  EXPECT_EQ(scheduler_->num_waiting_requests(), 2u) << "one sample still waits";
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 5 + 7);
  for (const auto& sequence : requests_[0]->samples) scheduler_->Remove(*sequence);
  EXPECT_EQ(scheduler_->num_waiting_requests(), 1u);
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 7);
}

// Requests that come, finish, are aborted and preempted in any order, from a fixed seed.
TEST_F(SchedulerTest, LeaksNoPageOverRandomOperations) {
  constexpr int32_t kPages = 24;
  SetUpScheduler(kPages, 6, 96);
  std::mt19937 random(20240601);
  std::vector<Sequence*> live;
  uint32_t num_preemptions = 0;
  size_t num_finished = 0;
  for (int step = 0; step < 5000; ++step) {
    if (random() % 4 == 0) {
      const size_t num_prompt = 1 + random() % 60;
      const auto max_tokens = static_cast<uint32_t>(1 + random() % (96 - num_prompt));
      live.push_back(&Add(num_prompt, max_tokens));
    }
    if (random() % 16 == 0 && !live.empty()) {
      scheduler_->Remove(*live[random() % live.size()]);
    }
    if (random() % 200 == 0) scheduler_->PreemptAll();
    const bool has_work = scheduler_->HasWork();
    const std::vector<Sequence*> batch = Step();
    EXPECT_EQ(has_work, !batch.empty());

    std::set<int32_t> held;
    size_t num_held = 0;
    int64_t tokens = 0;
    uint64_t last_arrival = 0;
    for (const Sequence* sequence : batch) {
      EXPECT_TRUE(sequence == batch.front() || sequence->arrival > last_arrival);
      last_arrival = sequence->arrival;
      tokens += sequence->num_cached == 0 ? static_cast<int64_t>(sequence->tokens.size()) - 1 : 1;
      EXPECT_EQ(static_cast<int64_t>(sequence->pages.size()),
                pages_->PagesFor(sequence->num_cached));
      held.insert(sequence->pages.begin(), sequence->pages.end());
      num_held += sequence->pages.size();
    }
    EXPECT_LE(tokens, 96);
    EXPECT_LE(batch.size(), 6u);
    EXPECT_EQ(held.size(), num_held) << "a page in two tables";
    EXPECT_EQ(static_cast<int32_t>(num_held), kPages - pages_->num_free()) << "a page leaked";

    for (Sequence* sequence : batch) {
      if (sequence->tokens.size() ==
          sequence->request->num_prompt_tokens + sequence->request->max_tokens) {
        scheduler_->Remove(*sequence);
        ++num_finished;
      }
    }
    std::erase_if(live, [&](const Sequence* sequence) {
      if (sequence->state == Sequence::State::kFinished)
        num_preemptions += sequence->num_preemptions;
      return sequence->state == Sequence::State::kFinished;
    });
  }
  EXPECT_GT(num_preemptions, 100u) << "the test must exercise preemption";
  EXPECT_GT(num_finished, 100u);
  for (Sequence* sequence : live) scheduler_->Remove(*sequence);
  EXPECT_EQ(pages_->num_free(), kPages);
  EXPECT_EQ(scheduler_->num_waiting_requests(), 0u);
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 0);
}

TEST(KvPagesTest, GrowsWhollyOrNotAtAll) {
  KvPages pages(3, 4);
  std::vector<int32_t> table;
  EXPECT_TRUE(pages.Grow(table, 5));
  EXPECT_EQ(table.size(), 2u);
  EXPECT_TRUE(pages.Grow(table, 8)) << "already covered";
  EXPECT_EQ(table.size(), 2u);
  std::vector<int32_t> other;
  EXPECT_FALSE(pages.Grow(other, 8));
  EXPECT_THAT(other, IsEmpty());
  EXPECT_EQ(pages.num_free(), 1);
}

TEST(KvPagesDeathTest, RefusesADoubleFree) {
  KvPages pages(3, 4);
  std::vector<int32_t> table;
  ASSERT_TRUE(pages.Grow(table, 8));
  std::vector<int32_t> copy = table;
  pages.Free(table);
  EXPECT_DEATH(pages.Free(copy), "freed twice");
}

}  // namespace
}  // namespace isobit
