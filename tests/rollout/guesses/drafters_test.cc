// What drafters guess, what they remember of whom, and how many guesses are made.
#include "rollout/guesses/drafters.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rollout/guesses/guess_table.h"
#include "rollout/guesses/history_store.h"
#include "rollout/guesses/speculation.h"
#include "rollout/guesses/suffix_index.h"
#include "rollout/schedule/request.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Tokens = std::vector<int32_t>;

Tokens Range(int32_t first, int32_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens Joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(SuffixIndexTest, FindsTheLongestPlaceAndOfEqualOnesTheLatest) {
  const Tokens text = {9, 1, 2, 3, 10, 8, 1, 2, 3, 11, 7, 1, 2, 3, 12};
  SuffixIndex index;
  index.Extend(text);
  EXPECT_EQ(index.Find(text, {9, 1, 2, 3}).end, 4u);
  EXPECT_EQ(index.Find(text, {9, 1, 2, 3}).length, 4u);
  EXPECT_EQ(index.Find(text, {5, 1, 2, 3}).end, 14u);
  EXPECT_EQ(index.Find(text, {5, 1, 2, 3}).length, 3u);
  EXPECT_EQ(index.Find(text, {2, 3}).length, 0u) << "too short";
  EXPECT_EQ(index.Find(text, {3, 2, 1}).length, 0u);
  EXPECT_EQ(index.Find(text, {2, 3, 12}).length, 0u) << "nothing follows";
}

// A slow search over all places must agree, however the text has grown.
TEST(SuffixIndexTest, AgreesWithASlowSearch) {
  std::mt19937 random(7);
  SuffixIndex index;
  Tokens text;
  int found = 0;
  for (int round = 0; round < 300; ++round) {
    for (uint32_t more = 1 + random() % 9; more > 0; --more) {
      text.push_back(static_cast<int32_t>(random() % 12));
    }
    index.Extend(text);
    Tokens suffix;
    while (suffix.size() < 8) suffix.push_back(static_cast<int32_t>(random() % 12));
    if (round % 2 == 0 && text.size() > 20) {
      const auto from = text.begin() + random() % static_cast<uint32_t>(text.size() - 10);
      std::copy_n(from, 5, suffix.end() - 5);
    }
    // Newest first, as many as the index looks at.
    SuffixIndex::Place expected;
    int candidates = 0;
    for (size_t end = text.size() - 1; end >= SuffixIndex::kLeast && candidates < 8; --end) {
      size_t length = 0;
      while (length < std::min(suffix.size(), end) &&
             text[end - 1 - length] == suffix[suffix.size() - 1 - length]) {
        ++length;
      }
      if (length < SuffixIndex::kLeast) continue;
      ++candidates;
      if (length > expected.length) expected = {end, length};
    }
    if (candidates == 8) continue;
    const SuffixIndex::Place actual = index.Find(text, suffix);
    EXPECT_EQ(actual.length, expected.length);
    EXPECT_EQ(actual.end, expected.end);
    found += actual.length > 0 ? 1 : 0;
  }
  EXPECT_GT(found, 100);
}

class DraftersTest : public testing::Test {
 protected:
  std::unique_ptr<Drafter> Make(const std::string& name, size_t history_bytes = 1 << 20) {
    const auto make = DraftersOf(name, {.history_bytes = history_bytes});
    ISOBIT_EXPECT_OK(make);
    return std::move((*make)().front());
  }

  Sequence& Begin(const Tokens& prompt, const std::string& client = "a", const Tokens& draft = {}) {
    GenerationRequest request;
    request.prompt = prompt;
    request.client = client;
    request.draft_tokens = draft;
    request.sampling.max_tokens = 100;
    requests_.push_back(std::make_unique<Request>(request, 0, nullptr));
    return *requests_.back()->samples[0];
  }

  static Tokens Guess(SequenceDrafter& drafter, const Tokens& tokens, size_t most = 4) {
    Tokens guesses;
    drafter.Guess(tokens, most, guesses);
    return guesses;
  }

  // A sample that draws `completion` and ends.
  void Run(Drafter& drafter, const Tokens& prompt, const Tokens& completion,
           const std::string& client = "a") {
    Sequence& sequence = Begin(prompt, client);
    sequence.tokens = Joined(sequence.tokens, completion);
    drafter.End(sequence);
  }

  std::vector<std::unique_ptr<Request>> requests_;
};

TEST_F(DraftersTest, NamesAreChecked) {
  EXPECT_EQ(*DraftersOf("off", {}), nullptr);
  EXPECT_EQ((*DraftersOf("history,lookup", {}))().size(), 2u);
  for (const char* names : {"", "lookup,", "lookup,lookup", "off,lookup", "eagle"}) {
    EXPECT_EQ(DraftersOf(names, {}).status().code(), absl::StatusCode::kInvalidArgument) << names;
  }
}

TEST_F(DraftersTest, LookupRepeatsThePrompt) {
  const auto drafter = Make("lookup");
  const auto sequence = drafter->Begin(Begin({}));
  Tokens tokens = Joined(Range(100, 20), {7, 8});
  EXPECT_THAT(Guess(*sequence, tokens), IsEmpty());
  tokens = Joined(tokens, {105, 106, 107});
  EXPECT_THAT(Guess(*sequence, tokens), ElementsAre(108, 109, 110, 111));
  tokens = Joined(tokens, {108, 109});
  EXPECT_THAT(Guess(*sequence, tokens), ElementsAre(110, 111, 112, 113));
  tokens.push_back(5);
  EXPECT_THAT(Guess(*sequence, tokens), IsEmpty()) << "it has left the text";
}

TEST_F(DraftersTest, LookupGoesOnInALoop) {
  const auto drafter = Make("lookup");
  const auto sequence = drafter->Begin(Begin({}));
  EXPECT_THAT(Guess(*sequence, {1, 2, 3, 4, 1, 2, 3, 4, 1}, 6), ElementsAre(2, 3, 4, 1, 2, 3));
}

TEST_F(DraftersTest, HistoryKnowsOtherSamplesOfThePrompt) {
  const auto drafter = Make("history");
  const Tokens prompt = Range(0, 10);
  Run(*drafter, prompt, Range(50, 10));
  const auto sequence = drafter->Begin(Begin(prompt));
  EXPECT_THAT(Guess(*sequence, prompt), ElementsAre(50, 51, 52, 53));
  EXPECT_THAT(Guess(*sequence, Joined(prompt, Range(50, 8))), ElementsAre(58, 59)) << "its end";
  // One that ends while the other runs.
  Run(*drafter, prompt, {50, 60, 61, 62, 63, 64, 65});
  EXPECT_THAT(Guess(*sequence, Joined(prompt, Joined(Range(50, 8), {60, 61, 62}))),
              ElementsAre(63, 64, 65));
  const auto other = drafter->Begin(Begin(Range(1, 10)));
  EXPECT_THAT(Guess(*other, Range(1, 10)), IsEmpty()) << "another prompt";
}

TEST_F(DraftersTest, HistoryTakesWhatTheClientSends) {
  const auto drafter = Make("history");
  const Tokens prompt = Range(0, 10);
  const auto sequence = drafter->Begin(Begin(prompt, "a", Range(70, 10)));
  EXPECT_THAT(Guess(*sequence, prompt), ElementsAre(70, 71, 72, 73));
}

// Texts that begin with the same token: the latest would be found, were it not for the sample's
// own.
TEST_F(DraftersTest, HistoryBeginsWithTheSamplesOwnText) {
  const auto drafter = Make("history");
  GenerationRequest request;
  request.prompt = Range(0, 10);
  request.sampling.n = 4;
  for (const int32_t first : {100, 200, 300}) {
    request.draft_lengths.push_back(10);
    request.draft_tokens = Joined(request.draft_tokens, Joined({50}, Range(first, 9)));
  }
  const Request four(request, 0, nullptr);
  std::vector<std::unique_ptr<SequenceDrafter>> sequences;
  for (const auto& sample : four.samples) sequences.push_back(drafter->Begin(*sample));
  const Tokens begun = Joined(request.prompt, {50});
  EXPECT_THAT(Guess(*sequences[0], begun), ElementsAre(100, 101, 102, 103));
  EXPECT_THAT(Guess(*sequences[1], begun), ElementsAre(200, 201, 202, 203));
  EXPECT_THAT(Guess(*sequences[2], begun), ElementsAre(300, 301, 302, 303));
  EXPECT_THAT(Guess(*sequences[3], begun), ElementsAre(100, 101, 102, 103)) << "the first again";
  // One that leaves its text follows another that goes on as it does.
  EXPECT_THAT(Guess(*sequences[0], Joined(begun, Range(200, 3))), ElementsAre(203, 204, 205, 206));
}

TEST_F(DraftersTest, HistoryBeginsWithATextThatItHadBefore) {
  const auto drafter = Make("history");
  const Tokens prompt = Range(0, 10);
  const Tokens own = Joined({50}, Range(100, 9));
  Run(*drafter, prompt, own);
  Run(*drafter, prompt, Joined({50}, Range(200, 9)));
  const auto sequence = drafter->Begin(Begin(prompt, "a", own));
  EXPECT_THAT(Guess(*sequence, Joined(prompt, {50})), ElementsAre(100, 101, 102, 103));
}

// INVARIANT: HistoryStore::Open.
TEST_F(DraftersTest, ClientsDoNotSeeEachOther) {
  const auto drafter = Make("history");
  const Tokens prompt = Range(0, 10);
  Run(*drafter, prompt, Range(50, 10), "a");
  EXPECT_THAT(Guess(*drafter->Begin(Begin(prompt, "b")), prompt), IsEmpty());
  EXPECT_THAT(Guess(*drafter->Begin(Begin(prompt, "a")), prompt), testing::SizeIs(4));
}

TEST_F(DraftersTest, ATextThatIsDroppedIsNotGuessed) {
  const auto drafter = Make("history", /*history_bytes=*/16384);
  const Tokens prompt = Range(0, 10);
  Run(*drafter, prompt, Range(50, 10));
  const auto sequence = drafter->Begin(Begin(prompt));
  EXPECT_THAT(Guess(*sequence, prompt), testing::SizeIs(4));
  for (int32_t i = 0; i < 40; ++i) Run(*drafter, Range(1000 * i, 10), Range(5, 10));
  EXPECT_THAT(Guess(*sequence, prompt), IsEmpty());
}

TEST(HistoryStoreTest, KeepsItsBoundAndSharesItFairly) {
  constexpr size_t kBytes = 1 << 20;
  HistoryStore store(kBytes);
  const auto texts_of = [&store](const std::string& client, const Tokens& prompt) {
    return store.Open(client, prompt)->text().size();
  };
  store.Add("small", {1, 2, 3}, Range(0, 100));
  std::mt19937 random(5);
  for (int32_t i = 0; i < 3000; ++i) {
    Tokens completion(20 + random() % 300);
    for (int32_t& token : completion) token = static_cast<int32_t>(random() % 50);
    store.Add("large", {static_cast<int32_t>(random() % 60)}, completion);
    ASSERT_LE(store.bytes(), kBytes);
  }
  EXPECT_GT(store.bytes(), kBytes / 2);
  EXPECT_GT(texts_of("small", {1, 2, 3}), 100u) << "another client's texts must not push it out";
}

TEST(HistoryStoreTest, OnePromptTakesAShare) {
  constexpr size_t kBytes = 1 << 20;
  HistoryStore store(kBytes);
  for (int32_t i = 0; i < 2000; ++i) store.Add("a", {7}, Range(i, 200));
  EXPECT_LE(store.bytes(), kBytes / 8);
  const auto texts = store.Open("a", {7});
  EXPECT_GT(texts->generation(), 0u);
  const SuffixIndex::Place place = texts->index().Find(texts->text(), Range(1990, 20));
  EXPECT_GE(place.length, 20u) << "the latest are kept";
  EXPECT_EQ(texts->index().Find(texts->text(), Range(0, 20)).length, 0u);
}

TEST(HistoryStoreTest, ATextIsKeptOnce) {
  HistoryStore store(1 << 20);
  store.Add("a", {7}, Range(0, 100));
  const size_t once = store.bytes();
  for (int i = 0; i < 10; ++i) store.Add("a", {7}, Range(0, 100));
  EXPECT_EQ(store.bytes(), once);
}

// Guesses cost as on the CPU, where one sequence wants an acceptance of 0.5.
class AcceptanceTest : public testing::Test {
 protected:
  static constexpr size_t kRunning = 1;

  class Anything final : public Drafter {
   public:
    class Zeros final : public SequenceDrafter {
      void Guess(absl::Span<const int32_t> /*tokens*/, size_t most,
                 std::vector<int32_t>& guesses) override {
        guesses.assign(most, 0);
      }
    };
    const char* name() const override { return "anything"; }
    std::unique_ptr<SequenceDrafter> Begin(const Sequence& /*sequence*/) override {
      return std::make_unique<Zeros>();
    }
  };

  static std::vector<std::unique_ptr<Drafter>> MakeDrafters() {
    std::vector<std::unique_ptr<Drafter>> drafters;
    drafters.push_back(std::make_unique<Anything>());
    return drafters;
  }

  // What a new sequence of the client guesses first; then all, or none, is right.
  size_t Begin(const std::string& client, bool is_right) {
    Request one(RequestOf(client), 0, nullptr);
    Sequence& sequence = *one.samples[0];
    speculation_.Draft(sequence, kRunning, kMaxGuesses);
    const size_t guesses = sequence.guesses.size();
    if (guesses == 0) return 0;
    const size_t right = is_right ? guesses : 0;
    speculation_.Settle(sequence, {.guesses = guesses, .right = right, .accepted = right});
    return guesses;
  }

  // How many tokens a new sequence of the client has before it is guessed for, if all of them are
  // `token`.
  size_t TokensToAGuess(const std::string& client, int32_t token, size_t most) {
    Request one(RequestOf(client), 0, nullptr);
    Sequence& sequence = *one.samples[0];
    for (size_t tokens = 0; tokens < most; ++tokens) {
      speculation_.Draft(sequence, kRunning, kMaxGuesses);
      if (!sequence.guesses.empty()) return tokens;
      sequence.tokens.push_back(token);
    }
    return most;
  }

  static GenerationRequest RequestOf(const std::string& client) {
    GenerationRequest request;
    request.prompt = Range(0, 10);
    request.client = client;
    return request;
  }

  static bool Waits(const Sequence& sequence) {
    return sequence.turn == Sequence::Turn::kAwaitsDraft;
  }

  Speculation speculation_{{.make_drafters = MakeDrafters}, 8};
};

TEST_F(AcceptanceTest, ASequenceBeginsWithItsClientsAcceptance) {
  EXPECT_GT(Begin("a", false), 0u) << "nothing is known: it is tried";
  for (int i = 0; i < 20; ++i) Begin("a", false);
  EXPECT_EQ(Begin("a", false), 0u);
  EXPECT_GT(Begin("b", true), 0u) << "another client's guesses say nothing";
  for (int i = 0; i < 100; ++i) Begin("b", true);
  EXPECT_EQ(Begin("b", true), 8u);
}

TEST_F(AcceptanceTest, WrongGuessesAreComparedUntilTheyAreRight) {
  for (int i = 0; i < 100; ++i) Begin("a", false);
  EXPECT_EQ(TokensToAGuess("a", /*token=*/1, /*most=*/1000), 1000u);
  const size_t tokens = TokensToAGuess("a", /*token=*/0, /*most=*/1000);
  EXPECT_GE(tokens, 4u) << "luck is not enough";
  EXPECT_LE(tokens, 20u);
  EXPECT_EQ(Begin("a", true), 0u) << "the client's follow more slowly";
  for (int i = 0; i < 20; ++i) TokensToAGuess("a", /*token=*/0, /*most=*/1000);
  EXPECT_GT(Begin("a", true), 0u);
}

TEST_F(AcceptanceTest, GuessesArePaidForByAllWhoAreInTheStep) {
  Request one(RequestOf("a"), 0, nullptr);
  Sequence& sequence = *one.samples[0];
  const auto draft = [&](size_t guesses, size_t num_sequences, bool sit_out) {
    sequence.guesses.clear();
    speculation_.Draft(sequence, 1, guesses);
    EXPECT_EQ(sequence.guesses.size(), guesses);
    speculation_.KeepWorthwhile({&sequence}, num_sequences, sit_out, kMaxGuesses);
    return sequence.guesses.size();
  };
  EXPECT_EQ(draft(2, 1, /*sit_out=*/false), 2u);
  EXPECT_EQ(draft(2, 32, /*sit_out=*/false), 0u) << "2 rows for 1.3 tokens";
  EXPECT_EQ(draft(1, 1, /*sit_out=*/false), 1u) << "0.75 tokens";
  EXPECT_EQ(draft(1, 1, /*sit_out=*/true), 0u) << "less than the one that it sits out";
}

// Of a sequence that waits for its pending token, which may not be the one that is guessed for it.
TEST_F(AcceptanceTest, WaitingForATokenMustPromiseMoreThanATokenMissed) {
  const std::vector<StepCost> constant = {{1, 1}, {8, 1}};
  Speculation speculation({.make_drafters = MakeDrafters, .costs = {constant, constant}}, 8);
  Request one(RequestOf("a"), 0, nullptr);
  Sequence& sequence = *one.samples[0];
  const auto waits = [&](double acceptance, bool sit_out) {
    speculation.Draft(sequence, 1, 1);
    sequence.guesses.clear();
    Speculation::StateOf(sequence).records[0].acceptance = acceptance;
    speculation.DecideToWait(sequence, 1, kMaxGuesses);
    EXPECT_TRUE(Waits(sequence));
    speculation.KeepWorthwhile({&sequence}, 1, sit_out, kMaxGuesses);
    return Waits(sequence);
  };
  EXPECT_TRUE(waits(0.7, /*sit_out=*/true)) << "0.7 x 2.2 tokens";
  EXPECT_FALSE(waits(0.6, /*sit_out=*/true)) << "0.6 x 1.5";
  EXPECT_TRUE(waits(0.6, /*sit_out=*/false));
}

TEST_F(AcceptanceTest, RoomGoesToThoseWhoseGuessesPay) {
  const std::vector<StepCost> constant = {{1, 1}, {8, 1}};
  Speculation speculation({.make_drafters = MakeDrafters, .costs = {constant, constant}}, 8);
  Request poor(RequestOf("a"), 0, nullptr);
  Request good(RequestOf("a"), 0, nullptr);
  Request late(RequestOf("a"), 0, nullptr);
  const auto expect = [&](Request& request, double acceptance) {
    Sequence& sequence = *request.samples[0];
    speculation.Draft(sequence, 1, 1);
    sequence.guesses.clear();
    Speculation::StateOf(sequence).records[0].acceptance = acceptance;
    speculation.DecideToWait(sequence, 3, kMaxGuesses);
    EXPECT_TRUE(Waits(sequence));
    return &sequence;
  };
  const std::vector<Sequence*> all = {expect(poor, 0.5), expect(good, 1.0), expect(late, 1.0)};
  const size_t guesses = Speculation::StateOf(*all[1]).num_guesses;
  speculation.KeepWorthwhile(all, 3, /*sit_out=*/true, /*room=*/2 * guesses - 1);
  EXPECT_FALSE(Waits(*all[0])) << "poor guesses";
  EXPECT_TRUE(Waits(*all[1]));
  EXPECT_FALSE(Waits(*all[2])) << "no room";
  for (Sequence* sequence : all) speculation.DecideToWait(*sequence, 3, kMaxGuesses);
  speculation.KeepWorthwhile(all, 3, /*sit_out=*/true, /*room=*/2 * guesses);
  EXPECT_TRUE(Waits(*all[2])) << "poor guesses take no room";
}

TEST(GuessTableTest, MoreForFewAndForGoodGuesses) {
  for (const StepCosts& costs : {CpuStepCosts(), GpuStepCosts(0.3e9, 1), GpuStepCosts(16e9, 1)}) {
    const GuessTable table(costs, 512, 8);
    for (const size_t running : {1u, 8u, 64u, 512u}) {
      size_t last = 0;
      for (int a = 0; a <= 20; ++a) {
        const size_t guesses = table.Guesses(running, a / 20.0);
        EXPECT_GE(guesses, last) << running << " run";
        last = guesses;
      }
      EXPECT_LE(table.Guesses(running, 0.9), table.Guesses(1, 0.9));
    }
    EXPECT_EQ(table.Guesses(1, 0.0), 0u);
    EXPECT_EQ(table.Guesses(512, 0.5), 0u) << "a full batch gains nothing";
  }
  EXPECT_GE(GuessTable(GpuStepCosts(4e9, 4), 512, 8).Guesses(8, 1.0), 7u);
  // Steps of few bytes, and of many ranks, lose more by being alone.
  const auto guesses = [](double weight_bytes, int num_ranks) {
    const GuessTable table(GpuStepCosts(weight_bytes, num_ranks), 512, 8);
    size_t of_all = 0;
    for (int a = 0; a <= 20; ++a) of_all += table.Guesses(8, a / 20.0);
    return of_all;
  };
  EXPECT_LT(guesses(0.3e9, 1), guesses(16e9, 1));
  EXPECT_LT(guesses(4e9, 8), guesses(4e9, 1));
}

}  // namespace
}  // namespace isobit
