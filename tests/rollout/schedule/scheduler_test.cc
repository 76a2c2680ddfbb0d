// Which sequences run when, and which KV pages they get: the scheduler without a model.
#include "rollout/schedule/scheduler.h"

#include <algorithm>
#include <deque>
#include <map>
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

std::unique_ptr<Request> MakeRequest(size_t num_prompt, uint32_t max_tokens, uint32_t n = 1,
                                     float presence_penalty = 0.0f) {
  GenerationRequest request;
  request.sampling.presence_penalty = presence_penalty;
  request.prompt.assign(num_prompt, 7);
  request.sampling.max_tokens = max_tokens;
  request.sampling.n = n;
  return std::make_unique<Request>(request, 0, nullptr);
}

// A scheduler over a few pages of four tokens, and a stand-in for the model.
class SchedulerTest : public testing::Test {
 protected:
  void SetUpScheduler(int32_t num_pages, size_t max_running = 8, int64_t max_batch_tokens = 1000) {
    pages_ = std::make_unique<StatePool>(PoolSize{.num_pages = num_pages, .page_size = 4});
    scheduler_ = std::make_unique<Scheduler>(SchedulerLimits{.max_running = max_running,
                                                             .max_batch_tokens = max_batch_tokens,
                                                             .share_prefixes = false},
                                             *pages_);
  }

  Sequence& Add(size_t num_prompt, uint32_t max_tokens = 100) {
    requests_.push_back(MakeRequest(num_prompt, max_tokens));
    scheduler_->Add(*requests_.back()->samples[0]);
    return *requests_.back()->samples[0];
  }

  // One whose tokens must be counted.
  Sequence& AddPenalised(size_t num_prompt) {
    requests_.push_back(MakeRequest(num_prompt, 100, 1, 0.5f));
    scheduler_->Add(*requests_.back()->samples[0]);
    return *requests_.back()->samples[0];
  }

  // Schedules, and does what the engine does at a launch.
  std::vector<Sequence*> Launch() {
    std::vector<Sequence*> batch = scheduler_->Schedule().sequences;
    for (Sequence* sequence : batch) {
      if (sequence->sampling == nullptr) sequence->request->BeginSampling(*sequence, {});
      sequence->num_cached =
          static_cast<int64_t>(sequence->tokens.size()) + sequence->num_pending++;
    }
    return batch;
  }

  // Does what the engine does when it has collected a step: each sequence gets its token.
  static void Commit(const std::vector<Sequence*>& batch) {
    for (Sequence* sequence : batch) {
      if (sequence->phase == Sequence::Phase::kFinished) continue;
      --sequence->num_pending;
      sequence->tokens.push_back(9);
    }
  }

  std::vector<Sequence*> Step() {
    const std::vector<Sequence*> batch = Launch();
    Commit(batch);
    return batch;
  }

  std::unique_ptr<StatePool> pages_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(SchedulerTest, PrefillsWholePromptsBesideDecodes) {
  SetUpScheduler(100);
  Sequence& a = Add(10);
  EXPECT_THAT(Step(), ElementsAre(&a));
  EXPECT_EQ(a.state.size(), 3u);
  Sequence& b = Add(5);
  const std::vector<Sequence*> batch = scheduler_->Schedule().sequences;
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
  // a takes the last page; b and c need one each, so c is preempted.
  EXPECT_THAT(Step(), ElementsAre(&a, &b));
  EXPECT_EQ(c.num_preemptions, 1u);
  EXPECT_EQ(c.phase, Sequence::Phase::kWaiting);
  EXPECT_TRUE(c.state.empty());
  EXPECT_EQ(c.num_cached, 0);
  EXPECT_EQ(c.tokens.size(), 5u) << "what it generated is its prompt now";
  EXPECT_EQ(newcomer.phase, Sequence::Phase::kWaiting);
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

TEST_F(SchedulerTest, RunsAheadOfPendingTokens) {
  SetUpScheduler(100);
  Sequence& a = Add(4);
  const auto first = Launch();
  EXPECT_EQ(a.state.size(), 1u);
  Sequence& b = Add(3);
  const auto second = Launch();
  EXPECT_THAT(second, ElementsAre(&a, &b));
  EXPECT_EQ(a.num_cached, 5);
  EXPECT_EQ(a.state.size(), 2u) << "a page for the token to come";
  Commit(first);
  EXPECT_THAT(Launch(), ElementsAre(&a, &b));
}

TEST_F(SchedulerTest, DoesNotRunBeyondTheLastToken) {
  SetUpScheduler(100);
  Sequence& a = Add(4, /*max_tokens=*/2);
  const auto first = Launch();
  const auto second = Launch();
  EXPECT_THAT(second, ElementsAre(&a));
  EXPECT_THAT(Launch(), IsEmpty()) << "its last token is on its way";
  EXPECT_TRUE(scheduler_->HasWork());
  Sequence& b = Add(1);
  EXPECT_THAT(Launch(), ElementsAre(&b)) << "which keeps no newcomer back";
  Commit(first);
  Commit(second);
  EXPECT_EQ(a.tokens.size(), 6u);
}

TEST_F(SchedulerTest, SequencesWithPenaltiesWaitForTheirTokens) {
  SetUpScheduler(100);
  Sequence& plain = Add(4);
  Sequence& penalised = AddPenalised(4);
  const auto first = Launch();
  EXPECT_THAT(first, ElementsAre(&plain, &penalised));
  const auto second = Launch();
  EXPECT_THAT(second, ElementsAre(&plain));
  Commit(first);
  EXPECT_THAT(Launch(), ElementsAre(&plain, &penalised));
}

TEST_F(SchedulerTest, SequencesThatWaitStayTogether) {
  SetUpScheduler(100);
  Sequence& a = AddPenalised(4);
  const auto first = Launch();
  Sequence& b = AddPenalised(4);
  EXPECT_THAT(Launch(), IsEmpty()) << "b alone would take turns with a ever after";
  Commit(first);
  EXPECT_THAT(Launch(), ElementsAre(&a, &b));
}

TEST_F(SchedulerTest, PreemptsASequenceWhoseTokenIsPending) {
  SetUpScheduler(3, 8);
  Sequence& a = Add(3);
  Sequence& b = Add(4);
  const auto first = Launch();
  EXPECT_THAT(first, ElementsAre(&a, &b));
  const int32_t* const pages_of_b = b.state.data();
  const int32_t page_of_b = pages_of_b[0];
  const auto second = Launch();  // b takes the last page
  EXPECT_THAT(second, ElementsAre(&a, &b));
  Commit(first);
  const auto third = Launch();  // a needs one
  EXPECT_THAT(third, ElementsAre(&a));
  EXPECT_EQ(b.phase, Sequence::Phase::kWaiting);
  EXPECT_EQ(b.num_pending, 1u);
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 6);
  EXPECT_EQ(pages_of_b[0], page_of_b) << "the second step may still read it";
  scheduler_->Remove(a);
  EXPECT_THAT(Launch(), IsEmpty()) << "b's token has not come yet";
  Commit(second);
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 6);
  EXPECT_THAT(Launch(), ElementsAre(&b));
  EXPECT_EQ(b.num_cached, 6);
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 0);
}

// Requests arrive, finish, are aborted and preempted in random order, from a fixed seed.
class SchedulerDepthTest : public SchedulerTest, public testing::WithParamInterface<size_t> {};
INSTANTIATE_TEST_SUITE_P(Depth, SchedulerDepthTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(SchedulerDepthTest, LeaksNoPageOverRandomOperations) {
  constexpr int32_t kPages = 24;
  SetUpScheduler(kPages, 6, 96);
  std::mt19937 random(20240601);
  std::deque<std::vector<Sequence*>> in_flight;
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
    std::map<const Sequence*, int64_t> num_cached;
    for (const Sequence* sequence : live) num_cached[sequence] = sequence->num_cached;
    const std::vector<Sequence*> batch = Launch();
    EXPECT_TRUE(has_work == !batch.empty() || (has_work && !in_flight.empty()));

    int64_t tokens = 0;
    uint64_t last_arrival = 0;
    for (const Sequence* sequence : batch) {
      EXPECT_TRUE(sequence == batch.front() || sequence->arrival > last_arrival);
      last_arrival = sequence->arrival;
      const bool starts = sequence->num_cached - num_cached[sequence] > 1;
      tokens += sequence->num_cached - (starts ? 0 : num_cached[sequence]);
      EXPECT_LE(sequence->num_pending, starts ? 1u : GetParam());
      EXPECT_EQ(static_cast<int64_t>(sequence->state.size()),
                pages_->PagesFor(sequence->num_cached));
    }
    EXPECT_LE(tokens, 96);
    EXPECT_LE(batch.size(), 6u);
    std::set<int32_t> held;
    size_t num_held = 0;
    for (const Sequence* sequence : live) {
      held.insert(sequence->state.begin(), sequence->state.end());
      num_held += sequence->state.size();
    }
    EXPECT_EQ(held.size(), num_held) << "a page in two tables";
    EXPECT_EQ(static_cast<int32_t>(num_held), kPages - pages_->num_free()) << "a page leaked";

    if (!batch.empty()) in_flight.push_back(batch);
    if (in_flight.empty() || (in_flight.size() < GetParam() && !batch.empty())) continue;
    Commit(in_flight.front());
    for (Sequence* sequence : in_flight.front()) {
      if (sequence->phase != Sequence::Phase::kFinished &&
          sequence->tokens.size() ==
              sequence->request->num_prompt_tokens + sequence->request->max_tokens) {
        scheduler_->Remove(*sequence);
        ++num_finished;
      }
    }
    in_flight.pop_front();
    std::erase_if(live, [&](const Sequence* sequence) {
      if (sequence->phase == Sequence::Phase::kFinished)
        num_preemptions += sequence->num_preemptions;
      return sequence->phase == Sequence::Phase::kFinished;
    });
  }
  EXPECT_GT(num_preemptions, 100u) << "the test must exercise preemption";
  EXPECT_GT(num_finished, 100u);
  for (Sequence* sequence : live) scheduler_->Remove(*sequence);
  EXPECT_EQ(pages_->num_free(), kPages);
  EXPECT_EQ(scheduler_->num_waiting_requests(), 0u);
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 0);
}

TEST(StatePoolTest, GrowsWhollyOrNotAtAll) {
  StatePool pages({.num_pages = 3, .page_size = 4});
  SequenceState table;
  EXPECT_TRUE(pages.Grow(table, 5, 12));
  EXPECT_EQ(table.size(), 2u);
  EXPECT_TRUE(pages.Grow(table, 8, 12)) << "already covered";
  EXPECT_EQ(table.size(), 2u);
  SequenceState other;
  EXPECT_FALSE(pages.Grow(other, 8, 12));
  EXPECT_TRUE(other.empty());
  EXPECT_EQ(pages.num_free(), 1);
}

TEST(StatePoolTest, NumbersStayInPlace) {
  StatePool pages({.num_pages = 100, .page_size = 1});
  SequenceState table;
  ASSERT_TRUE(pages.Grow(table, 1, 100));
  const int32_t* const numbers = table.data();
  for (int64_t tokens = 2; tokens <= 100; ++tokens) {
    ASSERT_TRUE(pages.Grow(table, tokens, 100));
    EXPECT_EQ(table.data(), numbers);
  }
  const std::vector<int32_t> before(table.begin(), table.end());
  pages.Free(table);
  EXPECT_TRUE(table.empty());
  EXPECT_EQ(std::vector<int32_t>(numbers, numbers + 100), before);
}

TEST(StatePoolDeathTest, RefusesADoubleFree) {
  const PoolSize size = {.num_pages = 3, .page_size = 4};
  StatePool pages(size), others(size);
  SequenceState table;
  ASSERT_TRUE(pages.Grow(table, 8, 12));
  EXPECT_DEATH(others.Free(table), "freed twice") << "there they are free";
}

}  // namespace
}  // namespace isobit
