// Which sequences share pages, and that nobody ever reads a page that does not hold its tokens: the
// scheduler and its pages without a model. A stand-in for the GPU keeps what was written to every
// slot.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rollout/schedule/prefix_tree.h"
#include "rollout/schedule/scheduler.h"
#include "rollout/schedule/state_pool.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int32_t kPageSize = 4;

// Stands for the key and value of a position, which depend on all tokens up to it and the weights.
using Content = uint64_t;
Content After(Content before, int32_t token) {
  uint64_t x = before ^ (static_cast<uint64_t>(token) + 0x9e3779b97f4a7c15u);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The scheduler, and what the engine and the GPU do with its steps.
class PrefixSharingTest : public testing::Test {
 protected:
  void SetUpScheduler(int32_t num_pages, size_t max_running = 16, int64_t max_batch_tokens = 1000,
                      int32_t max_cached = 1 << 20) {
    pages_ = std::make_unique<StatePool>(
        PoolSize{.num_pages = num_pages, .page_size = kPageSize, .max_cached = max_cached});
    scheduler_ = std::make_unique<Scheduler>(
        SchedulerLimits{.max_running = max_running, .max_batch_tokens = max_batch_tokens}, *pages_);
    slots_.assign(static_cast<size_t>(num_pages) * kPageSize, 0);
  }

  Request& Add(std::vector<int32_t> prompt, uint32_t max_tokens = 100, uint32_t n = 1) {
    GenerationRequest request;
    request.prompt = std::move(prompt);
    request.sampling.max_tokens = max_tokens;
    request.sampling.n = n;
    requests_.push_back(std::make_unique<Request>(request, requests_.size(), nullptr));
    for (const auto& sequence : requests_.back()->samples) scheduler_->Add(*sequence);
    return *requests_.back();
  }

  static std::vector<int32_t> Tokens(int32_t count, int32_t first = 1) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = first + i;
    return tokens;
  }

  // What the GPU knows of a sequence: the tokens that it has drawn and that are not committed.
  struct Launched {
    Sequence* sequence;
    int32_t drawn;
  };
  using StepInFlight = std::vector<Launched>;

  Content& Slot(const Sequence& sequence, int64_t position) {
    const auto page = static_cast<size_t>(sequence.state.data()[position / kPageSize]);
    return slots_[page * kPageSize + static_cast<size_t>(position % kPageSize)];
  }

  // Schedules a step, plans it as the engine does, and computes it as a GPU does: first the copies,
  // then all rows write, then all rows read. Unless the step says that it writes what it reads, the
  // GPU may read the past early, so that must have been there before.
  StepInFlight Launch() {
    step_ = scheduler_->Schedule();
    std::vector<Content> before = slots_;
    for (const PageCopy& copy : step_.copies) {
      std::copy_n(slots_.begin() + copy.from * kPageSize, kPageSize,
                  slots_.begin() + copy.to * kPageSize);
      std::copy_n(before.begin() + copy.from * kPageSize, kPageSize,
                  before.begin() + copy.to * kPageSize);
    }
    rows_ = 0;
    StepInFlight step;
    std::vector<std::pair<const Sequence*, int64_t>> first_positions;
    for (Sequence* sequence : step_.sequences) {
      if (sequence->sampling == nullptr) sequence->request->BeginSampling(*sequence, {});
      std::vector<int32_t> tokens = sequence->tokens;
      const std::vector<int32_t>& pending = pending_[sequence];
      tokens.insert(tokens.end(), pending.begin(), pending.end());
      ASSERT_EQ_OR_RETURN(pending.size(), sequence->num_pending);
      const auto end = static_cast<int64_t>(tokens.size());
      Content content = version_;
      for (int64_t p = 0; p < end; ++p) {
        content = After(content, tokens[static_cast<size_t>(p)]);
        if (p >= sequence->num_cached) Slot(*sequence, p) = content;
      }
      rows_ += end - sequence->num_cached;
      if (end == sequence->num_cached) {
        EXPECT_FALSE(step.empty());
        EXPECT_EQ(step.back().sequence->tokens, sequence->tokens) << "it draws from that row";
      }
      if (end > sequence->num_cached) first_positions.emplace_back(sequence, sequence->num_cached);
      sequence->num_cached = end;
      ++sequence->num_pending;
      const auto drawn = static_cast<int32_t>(
          After(content, static_cast<int32_t>(sequence->request->seed + sequence->sample)) % 7);
      step.push_back({sequence, drawn});
    }
    for (const auto& [sequence, first] : first_positions) {
      Content content = version_;
      std::vector<int32_t> tokens = sequence->tokens;
      const std::vector<int32_t>& pending = pending_[sequence];
      tokens.insert(tokens.end(), pending.begin(), pending.end());
      for (int64_t p = 0; p < static_cast<int64_t>(tokens.size()); ++p) {
        content = After(content, tokens[static_cast<size_t>(p)]);
        const Content read = Slot(*sequence, p);
        wrong_ += read == content ? 0 : 1;
        if (step_.writes_past || p >= first) continue;
        const auto slot = static_cast<size_t>(&Slot(*sequence, p) - slots_.data());
        wrong_early_ += before[slot] == content ? 0 : 1;
      }
    }
    for (const Launched& launched : step) {
      pending_[launched.sequence].push_back(launched.drawn);
    }
    return step;
  }

  void Commit(const StepInFlight& step) {
    for (const auto& [sequence, drawn] : step) {
      std::vector<int32_t>& pending = pending_[sequence];
      if (sequence->phase == Sequence::Phase::kFinished) continue;
      EXPECT_EQ(pending.front(), drawn);
      pending.erase(pending.begin());
      --sequence->num_pending;
      sequence->tokens.push_back(drawn);
    }
  }

  // The rows of one step.
  int64_t Step() {
    Commit(Launch());
    return rows_;
  }

  // Stands for a switch of weights.
  void SwitchWeights() {
    scheduler_->PreemptAll();
    pages_->Forget();
    version_ = After(version_, 1);
  }

  void Finish(Request& request) {
    for (const auto& sequence : request.samples) {
      if (sequence->phase != Sequence::Phase::kFinished) scheduler_->Remove(*sequence);
    }
  }

  void ExpectRightReads() const {
    EXPECT_EQ(wrong_, 0) << "positions read that hold something else";
    EXPECT_EQ(wrong_early_, 0) << "positions read before their own step wrote them";
  }

  std::unique_ptr<StatePool> pages_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<Content> slots_;  // [pages, kPageSize]
  std::map<const Sequence*, std::vector<int32_t>> pending_;
  Content version_ = 1;
  ScheduledStep step_;  // the last
  int64_t rows_ = 0;    // of it
  int64_t wrong_ = 0;
  int64_t wrong_early_ = 0;

 private:
  template <typename T, typename U>
  static void ASSERT_EQ_OR_RETURN(const T& actual, const U& expected) {
    EXPECT_EQ(actual, static_cast<T>(expected));
  }
};

TEST_F(PrefixSharingTest, SamplesShareTheirPrompt) {
  SetUpScheduler(100);
  for (const int32_t prompt : {1, 3, 4, 5, 8, 9}) {
    SCOPED_TRACE(prompt);
    pages_->Forget();
    Request& request = Add(Tokens(prompt), 100, 5);
    EXPECT_EQ(Step(), prompt) << "one prefill";
    EXPECT_THAT(step_.sequences, SizeIs(5));
    EXPECT_EQ(pages_->num_pages() - pages_->num_free(), pages_->PagesFor(prompt));
    EXPECT_EQ(Step(), 5);
    const bool partial = prompt % kPageSize != 0;
    EXPECT_THAT(step_.copies, SizeIs(partial ? 4 : 0)) << "the first keeps its last page";
    EXPECT_EQ(pages_->num_pages() - pages_->num_free(), prompt / kPageSize + 5);
    Step();
    EXPECT_THAT(step_.copies, IsEmpty());
    EXPECT_EQ(request.samples[0]->num_cached_prompt_tokens, 0u);
    EXPECT_EQ(request.samples[4]->num_cached_prompt_tokens, static_cast<uint32_t>(prompt));
    Finish(request);
  }
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, AGroupStartsAsFarAsItFits) {
  SetUpScheduler(100, /*max_running=*/4);
  Request& request = Add(Tokens(10), 100, 6);
  EXPECT_EQ(Step(), 10);
  EXPECT_THAT(step_.sequences, SizeIs(4));
  scheduler_->Remove(*request.samples[0]);
  scheduler_->Remove(*request.samples[1]);
  EXPECT_EQ(Step(), 2 + 2) << "the prompt's last partial page is computed again";
  EXPECT_THAT(step_.sequences, SizeIs(4));
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, AGroupLeavesPagesForItsFirstTokens) {
  SetUpScheduler(6);
  Add(Tokens(10), 2, 6);  // 3 pages
  Step();
  EXPECT_THAT(step_.sequences, SizeIs(4)) << "the others would be preempted at once";
  Step();
  for (const Sequence* sequence : step_.sequences) EXPECT_EQ(sequence->num_preemptions, 0u);
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, TheFirstSampleMayEndBeforeTheOthersWrite) {
  SetUpScheduler(100);
  Request& request = Add(Tokens(6), 100, 3);
  const StepInFlight first = Launch();
  const StepInFlight second = Launch();  // all three write, two to copies
  EXPECT_THAT(step_.copies, SizeIs(2));
  Commit(first);
  scheduler_->Remove(*request.samples[0]);
  Commit(second);
  Step();
  ExpectRightReads();

  Request& other = Add(Tokens(6, 50), 100, 3);
  Step();
  scheduler_->Remove(*other.samples[0]);
  scheduler_->Remove(*other.samples[1]);
  Step();
  EXPECT_THAT(step_.copies, IsEmpty()) << "nobody else has the page";
  ExpectRightReads();
}

// A page that its owner has filled and left to the cache must not change.
TEST_F(PrefixSharingTest, APublishedPageIsCopiedThoughNobodyElseHasIt) {
  SetUpScheduler(100);
  Request& request = Add(Tokens(3), 100, 2);
  Sequence& owner = *request.samples[0];
  Sequence& late = *request.samples[1];
  Step();
  owner.tokens.push_back(7);  // as if it had run without the other for two steps
  owner.num_cached = 5;
  Slot(owner, 3) = After(After(After(After(version_, 1), 2), 3), owner.tokens[3]);
  const std::vector<int32_t> conversation = {1, 2, 3, owner.tokens[3], 9};
  scheduler_->Remove(owner);
  Add(conversation);
  Step();
  EXPECT_EQ(late.phase, Sequence::Phase::kRunning);
  EXPECT_THAT(step_.copies, SizeIs(1));
  EXPECT_EQ(requests_.back()->samples[0]->num_cached_prompt_tokens, 4u);
  Step();
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, EqualPromptsOfOneStepShareWholePages) {
  SetUpScheduler(100);
  Add(Tokens(10));
  Add(Tokens(10));
  Add(Tokens(8));  // its last token is computed in any case
  EXPECT_EQ(Step(), 10 + 2 + 4);
  EXPECT_TRUE(step_.writes_past);
  Add(Tokens(9));
  EXPECT_EQ(Step(), 3 + 1);
  EXPECT_FALSE(step_.writes_past) << "earlier steps wrote it";
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, AConversationFindsItsTurns) {
  SetUpScheduler(100);
  Request& turn = Add(Tokens(5), 8);
  for (int i = 0; i < 8; ++i) Step();
  std::vector<int32_t> next = turn.samples[0]->tokens;
  ASSERT_THAT(next, SizeIs(13));
  Finish(turn);
  EXPECT_EQ(pages_->num_cached(), 3) << "of 12 tokens; the last was never computed";
  next.push_back(99);
  Add(next);
  EXPECT_EQ(Step(), 2);
  EXPECT_EQ(requests_.back()->samples[0]->num_cached_prompt_tokens, 12u);
  EXPECT_EQ(scheduler_->prompt_counts().all, 5 + 14);
  EXPECT_EQ(scheduler_->prompt_counts().cached, 12);
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, TheBudgetCountsWhatIsComputed) {
  SetUpScheduler(100, 16, /*max_batch_tokens=*/20);
  Finish((Step(), Add(Tokens(16), 1)));
  Add(Tokens(16));
  Step();
  Finish(*requests_.back());
  Add(Tokens(18));
  Add(Tokens(17));
  Add(Tokens(18));
  EXPECT_EQ(Step(), 2 + 1 + 2);
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, CachedPagesYieldBeforeAnybodyIsPreempted) {
  SetUpScheduler(8);
  Request& old = Add(Tokens(16), 1);
  Step();
  Finish(old);
  EXPECT_EQ(pages_->num_cached(), 4);
  EXPECT_EQ(pages_->num_free(), 8);
  Add(Tokens(24, 100));
  Step();
  EXPECT_EQ(pages_->num_cached(), 2) << "the end of the old prompt went first";
  EXPECT_THAT(pages_->Find(Tokens(16)).pages, SizeIs(2));
  Step();
  for (const Sequence* sequence : step_.sequences) EXPECT_EQ(sequence->num_preemptions, 0u);
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, TheLeastRecentlyUsedGoesFirst) {
  SetUpScheduler(9);
  for (const int32_t first : {100, 200, 300}) {
    Request& request = Add(Tokens(9, first), 1);
    Step();
    Finish(request);
  }
  EXPECT_EQ(pages_->num_cached(), 6);
  Request& again = Add(Tokens(9, 100), 1);
  EXPECT_EQ(Step(), 1);
  Finish(again);
  Add(Tokens(20, 900), 1);  // 5 pages, of which 3 were free
  Step();
  EXPECT_THAT(pages_->Find(Tokens(8, 100)).pages, SizeIs(2));
  EXPECT_THAT(pages_->Find(Tokens(8, 200)).pages, IsEmpty());
  EXPECT_THAT(pages_->Find(Tokens(8, 300)).pages, SizeIs(2));
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, APreemptedSequenceFindsItsPages) {
  SetUpScheduler(5);
  Request& first = Add(Tokens(8), 100);
  Request& second = Add(Tokens(8, 50), 100);
  Step();  // 4 pages
  Step();  // the fifth; the second is preempted, and its third page never was
  EXPECT_EQ(second.samples[0]->num_preemptions, 1u);
  Finish(first);
  EXPECT_EQ(Step(), 1) << "9 tokens, 8 of them cached";
  ExpectRightReads();
}

TEST_F(PrefixSharingTest, KeepsNoMoreUnusedPagesThanItMay) {
  SetUpScheduler(20, 16, 1000, /*max_cached=*/3);
  Request& request = Add(Tokens(20), 1);
  Step();
  Finish(request);
  EXPECT_EQ(pages_->num_cached(), 3);
  EXPECT_THAT(pages_->Find(Tokens(20)).pages, SizeIs(3)) << "the beginning";
  Request& two = Add(Tokens(8, 50), 10, 2);
  Step();
  Finish(two);
  EXPECT_EQ(pages_->num_cached(), 3);
  EXPECT_EQ(pages_->num_free(), 20);
}

// 16 tokens of prompt and up to 4 of each sample take 4 + 8 pages a group, and 8 * 5 without
// sharing.
TEST_F(PrefixSharingTest, MoreSamplesFitIntoThePages) {
  for (const bool share : {true, false}) {
    SetUpScheduler(40, /*max_running=*/100);
    if (!share) {
      scheduler_ = std::make_unique<Scheduler>(
          SchedulerLimits{.max_running = 100, .max_batch_tokens = 1000, .share_prefixes = false},
          *pages_);
    }
    for (int32_t group = 0; group < 5; ++group) Add(Tokens(16, 100 * group), 4, 8);
    for (int i = 0; i < 4; ++i) Step();
    EXPECT_THAT(step_.sequences, SizeIs(share ? 24 : 8));
    ExpectRightReads();
    for (const auto& request : requests_) Finish(*request);
    requests_.clear();
  }
}

TEST_F(PrefixSharingTest, NewWeightsFindNothing) {
  SetUpScheduler(100);
  Request& request = Add(Tokens(10), 100, 3);
  Step();
  Step();
  SwitchWeights();
  EXPECT_EQ(pages_->num_cached(), 0);
  Step();
  EXPECT_EQ(rows_, 12 + 2 * 4) << "all of the first, of the others what follows two pages";
  ExpectRightReads();
  Finish(request);
}

// Requests with common beginnings arrive, go on as conversations, finish, are aborted and
// preempted, and weights are switched, in random order from a fixed seed.
class PrefixSharingDepthTest : public PrefixSharingTest,
                               public testing::WithParamInterface<size_t> {
 protected:
  static constexpr int32_t kPages = 40;
  static constexpr int64_t kBudget = 96;

  std::vector<int32_t> RandomPrompt() {
    std::vector<int32_t> prompt;
    if (!history_.empty() && random_() % 4 == 0) prompt = history_[random_() % history_.size()];
    if (prompt.empty()) prompt = Tokens(1 + static_cast<int32_t>(random_() % 24));
    if (random_() % 2 == 0) prompt.resize(1 + random_() % prompt.size());
    for (uint32_t more = random_() % 6; more > 0; --more) {
      prompt.push_back(static_cast<int32_t>(random_() % 3));
    }
    if (prompt.size() > 60) prompt.resize(60);
    return prompt;
  }

  void ExpectCountsOfTables() {
    std::vector<int32_t> counts(kPages, 0);
    for (const Request* request : live_) {
      for (const auto& sequence : request->samples) {
        for (const int32_t page : sequence->state) ++counts[static_cast<size_t>(page)];
      }
    }
    int32_t unused = 0;
    for (int32_t page = 0; page < kPages; ++page) {
      ASSERT_EQ(pages_->count(page), counts[static_cast<size_t>(page)]) << "page " << page;
      unused += counts[static_cast<size_t>(page)] == 0 ? 1 : 0;
    }
    ASSERT_EQ(pages_->num_free(), unused) << "a page leaked";
    ASSERT_LE(pages_->num_cached(), pages_->num_free());
  }

  // Ends sequences that have all their tokens, and forgets requests that have ended.
  void EndFinished() {
    std::erase_if(live_, [&](Request* request) {
      bool ended = true;
      for (const auto& sequence : request->samples) {
        if (sequence->phase != Sequence::Phase::kFinished &&
            sequence->tokens.size() == request->num_prompt_tokens + request->max_tokens) {
          history_.push_back(sequence->tokens);
          num_preemptions_ += sequence->num_preemptions;
          scheduler_->Remove(*sequence);
        }
        ended &= sequence->phase == Sequence::Phase::kFinished;
      }
      return ended;
    });
    while (history_.size() > 12) history_.pop_front();
  }

  std::mt19937 random_{20261123};
  std::vector<Request*> live_;
  std::deque<std::vector<int32_t>> history_;  // of conversations
  uint32_t num_preemptions_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Depth, PrefixSharingDepthTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(PrefixSharingDepthTest, KeepsCountsOverRandomOperations) {
  SetUpScheduler(kPages, 8, kBudget, /*max_cached=*/24);
  std::deque<StepInFlight> in_flight;
  int64_t num_copies = 0;
  int64_t num_writing_past = 0;
  int64_t most_shared = 0;
  for (int operation = 0; operation < 100000; ++operation) {
    if (random_() % 3 == 0 && live_.size() < 12) {
      const std::vector<int32_t> prompt = RandomPrompt();
      const auto most = static_cast<uint32_t>(kBudget - static_cast<int64_t>(prompt.size()));
      live_.push_back(&Add(prompt, 1 + random_() % std::min(most, 40u), 1 + random_() % 5));
    }
    if (random_() % 24 == 0 && !live_.empty()) Finish(*live_[random_() % live_.size()]);
    if (random_() % 16 == 0 && !live_.empty()) {
      const Request& request = *live_[random_() % live_.size()];
      Sequence& sequence = *request.samples[random_() % request.samples.size()];
      if (sequence.phase != Sequence::Phase::kFinished) scheduler_->Remove(sequence);
    }
    if (random_() % 300 == 0) scheduler_->PreemptAll();
    if (random_() % 300 == 0 && in_flight.empty()) SwitchWeights();
    StepInFlight step = Launch();
    num_copies += static_cast<int64_t>(step_.copies.size());
    num_writing_past += step_.writes_past ? 1 : 0;
    EXPECT_LE(rows_, kBudget);
    EXPECT_LE(step.size(), 8u);
    for (int32_t page = 0; page < kPages; ++page) {
      most_shared = std::max<int64_t>(most_shared, pages_->count(page));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectCountsOfTables());
    ASSERT_EQ(wrong_, 0) << "operation " << operation;
    ASSERT_EQ(wrong_early_, 0) << "operation " << operation;
    const bool empty = step.empty();
    if (!empty) in_flight.push_back(std::move(step));
    if (in_flight.empty() || (in_flight.size() < GetParam() && !empty)) continue;
    Commit(in_flight.front());
    in_flight.pop_front();
    EndFinished();
  }
  EXPECT_GT(num_preemptions_, 500u) << "the test must exercise preemption";
  EXPECT_GT(num_copies, 5000);
  EXPECT_GT(num_writing_past, 500);
  EXPECT_EQ(most_shared, 8);
  EXPECT_GT(scheduler_->prompt_counts().cached, scheduler_->prompt_counts().all / 4);
  for (Request* request : live_) Finish(*request);
  EXPECT_EQ(pages_->num_free(), kPages);
  pages_->Forget();
  EXPECT_EQ(pages_->num_cached(), 0);
  EXPECT_EQ(scheduler_->num_waiting_tokens(), 0);
}

TEST(PrefixTreeTest, KeepsThePageThatIsThere) {
  StateSlots slots(0, 1);
  PrefixTree tree(10, 2, slots);
  const int32_t first[] = {0, 1};
  const int32_t second[] = {2, 3, 4};
  EXPECT_THAT(tree.Enter({7, 8, 9, 10, 11}, first), ElementsAre(0, 1));
  EXPECT_THAT(tree.Enter({7, 8, 9, 9, 5, 6}, second), ElementsAre(0, 3, 4));
  EXPECT_FALSE(tree.Has(2));
  EXPECT_THAT(tree.Find({7, 8, 9, 9, 5}), ElementsAre(0, 3));
  EXPECT_THAT(tree.Find({8}), IsEmpty());
  EXPECT_THAT(tree.Find({8, 7}), IsEmpty());
}

TEST(PrefixTreeTest, TakesTheOldestFromTheEnd) {
  StateSlots slots(0, 1);
  PrefixTree tree(10, 1, slots);
  const int32_t pages[] = {0, 1, 2};
  tree.Enter({5, 6, 7}, pages);
  for (const int32_t page : {2, 1, 0}) tree.SetUnused(page);
  const int32_t other[] = {3};
  tree.Enter({9}, other);
  tree.SetUnused(3);
  tree.Touch(tree.Find({5, 6}));
  EXPECT_EQ(tree.TakeOldest(), 2);
  EXPECT_EQ(tree.TakeOldest(), 3);
  EXPECT_THAT(tree.Find({5, 6, 7}), ElementsAre(0, 1));
  EXPECT_EQ(tree.num_unused(), 2);
  EXPECT_THAT(tree.TakeAll(), ElementsAre(1, 0));
  EXPECT_THAT(tree.Find({5}), IsEmpty());
}

TEST(StatePoolDeathTest, ForgetsNoPageInUse) {
  StatePool pages({.num_pages = 3, .page_size = 4});
  SequenceState table;
  ASSERT_TRUE(pages.Grow(table, 8, 12));
  EXPECT_DEATH(pages.Forget(), "pages in use");
}

}  // namespace
}  // namespace isobit
