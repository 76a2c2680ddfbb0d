// The rows of a pass: each page of tokens that sequences begin with is computed once, and every
// position of every sequence is found where its token was computed.
#include "trainer_bridge/scorer/packed_pass.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"
#include "trainer_bridge/scorer/page_numbers.h"

namespace isobit {
namespace {

using Tokens = std::vector<int32_t>;

Tokens Range(int32_t first, size_t count) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens AllTokens(const ScoreInput& input) {
  Tokens tokens = input.prompt;
  tokens.insert(tokens.end(), input.completion.begin(), input.completion.end());
  return tokens;
}

std::vector<ScoreItem> ItemsOf(const std::vector<ScoreInput>& inputs) {
  const std::shared_ptr<ScoreJob> job = MakeJob(inputs).job;
  std::vector<ScoreItem> items;
  for (size_t i = 0; i < inputs.size(); ++i) items.push_back({job, i});
  return items;
}

int64_t RowsOf(const std::vector<ScoreInput>& inputs) {
  return PackedPass(ItemsOf(inputs), true, false).num_rows();
}

// What must hold of every pass. Checks each sequence's tokens and each page's and slot's writer.
void ExpectSound(const std::vector<ScoreInput>& inputs, bool sharing, bool has_slots) {
  const std::vector<ScoreItem> items = ItemsOf(inputs);
  const PackedPass pass(items, sharing, has_slots);
  const Batch& batch = pass.batch();
  // The tokens before a position, as the page tables say, by row.
  std::vector<Tokens> history_of_row(batch.ids.size());
  std::vector<Tokens> page_history(static_cast<size_t>(pass.num_pages()));  // up to its last token
  std::map<int32_t, Tokens> slot_history;
  int64_t next_row = 0;
  bool reads_past = false;
  for (const SequenceRows& s : batch.sequences) {
    ASSERT_EQ(s.first_row, next_row);
    ASSERT_GT(s.num_rows, 0);
    ASSERT_EQ(s.first_position % kScorePageSize, 0);
    next_row += s.num_rows;
    reads_past = reads_past || s.first_position > 0;
    Tokens history;
    if (s.first_position > 0) {
      const auto before = static_cast<size_t>(s.pages[s.first_position / kScorePageSize - 1]);
      history = page_history[before];
      ASSERT_EQ(static_cast<int64_t>(history.size()), s.first_position) << "not written before";
    }
    ASSERT_EQ(s.from_slot != kNoSlot, has_slots && s.first_position > 0);
    if (s.from_slot != kNoSlot) {
      ASSERT_EQ(slot_history.at(s.from_slot), history) << "another state";
    }
    for (int64_t i = 0; i < s.num_rows; ++i) {
      const auto row = static_cast<size_t>(s.first_row + i);
      history.push_back(batch.ids[row]);
      history_of_row[row] = history;
      const auto page = static_cast<size_t>(s.pages[(s.first_position + i) / kScorePageSize]);
      ASSERT_LT(page, page_history.size());
      ASSERT_TRUE(page_history[page].size() < history.size()) << "written twice";
      page_history[page] = history;
    }
    if (s.to_slot != kNoSlot) {
      ASSERT_TRUE(has_slots);
      ASSERT_TRUE(s.to_slot > kCutSlot && s.to_slot <= pass.num_slots()) << s.to_slot;
      ASSERT_TRUE(slot_history.emplace(s.to_slot, history).second) << "written twice";
    }
  }
  EXPECT_EQ(std::ssize(slot_history), pass.num_slots());
  EXPECT_EQ(next_row, pass.num_rows());
  EXPECT_EQ(batch.writes_past, reads_past);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tokens tokens = AllTokens(inputs[i]);
    for (size_t position = 0; position < tokens.size(); ++position) {
      const auto row = static_cast<size_t>(pass.RowOf(i, static_cast<int64_t>(position)));
      ASSERT_LT(row, history_of_row.size());
      ASSERT_EQ(history_of_row[row],
                Tokens(tokens.begin(), tokens.begin() + static_cast<int64_t>(position) + 1))
          << "sequence " << i << ", position " << position;
    }
  }
  if (!sharing) {
    int64_t total = 0;
    for (const ScoreInput& input : inputs) total += input.num_tokens();
    EXPECT_EQ(pass.num_rows(), total);
  }
}

TEST(PackedPassTest, FindsEveryPositionInRandomMixes) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<ScoreInput> inputs(1 + random() % 12);
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tokens tokens;
      if (i > 0 && random() % 4 > 0) {  // begins like an earlier one
        tokens = AllTokens(inputs[random() % i]);
        tokens.resize(random() % (tokens.size() + 1));
      }
      const size_t more = (tokens.empty() ? 1 : 0) + random() % 50;
      for (size_t t = 0; t < more; ++t) tokens.push_back(static_cast<int32_t>(random() % 3));
      const auto prompt = static_cast<int64_t>(1 + random() % tokens.size());
      inputs[i] = {Tokens(tokens.begin(), tokens.begin() + prompt),
                   Tokens(tokens.begin() + prompt, tokens.end())};
    }
    for (const bool slots : {false, true}) ExpectSound(inputs, true, slots);
    for (const bool slots : {false, true}) ExpectSound(inputs, false, slots);
  }
}

TEST(PackedPassTest, ComputesAPromptOnce) {
  const Tokens prompt = Range(100, 1024);
  std::vector<ScoreInput> inputs;
  for (int32_t i = 0; i < 8; ++i) inputs.push_back({prompt, Range(5000 + 300 * i, 256)});
  EXPECT_EQ(RowsOf(inputs), 1024 + 8 * 256);
  for (const bool slots : {false, true}) ExpectSound(inputs, true, slots);
}

TEST(PackedPassTest, ComputesAPartlyFilledPageForEachSequence) {
  EXPECT_EQ(RowsOf({{Range(0, 20), {50}}, {Range(0, 20), {51}}}), 21 + 5);
  EXPECT_EQ(RowsOf({{Range(0, 15), {50}}, {Range(0, 15), {51}}}), 16 + 16);
  EXPECT_EQ(RowsOf({{Range(0, 15), {50}}, {Range(0, 15), {50, 7}}}), 16 + 1);
}

TEST(PackedPassTest, ASequenceMayHaveNoRowsOfItsOwn) {
  EXPECT_EQ(RowsOf({{Range(0, 30), {1, 2}}, {Range(0, 30), {1, 2}}}), 32);
  EXPECT_EQ(RowsOf({{Range(0, 48), {}}, {Range(0, 16), {}}}), 48);
  EXPECT_EQ(RowsOf({{Range(0, 16), {}}, {Range(0, 48), {}}}), 48);
  for (const bool slots : {false, true})
    ExpectSound({{Range(0, 48), {}}, {Range(0, 16), {}}, {Range(0, 48), {9}}}, true, slots);
}

TEST(PackedPassTest, APageIsAnothersOnlyIfAllBeforeItIs) {
  Tokens other = Range(0, 32);
  other[0] = 99;  // only the second page has the same tokens
  EXPECT_EQ(RowsOf({{Range(0, 32), {}}, {other, {}}}), 64);
}

TEST(PackedPassTest, SaysThatTheStepWritesWhatItsSequencesRead) {
  const std::vector<ScoreInput> alike = {{Range(0, 17), {}}, {Range(0, 18), {}}};
  EXPECT_TRUE(PackedPass(ItemsOf(alike), true, false).batch().writes_past);
  EXPECT_FALSE(PackedPass(ItemsOf(alike), false, false).batch().writes_past);
  EXPECT_FALSE(PackedPass(ItemsOf({{Range(0, 17), {}}, {Range(1, 18), {}}}), true, false)
                   .batch()
                   .writes_past);
}

}  // namespace
}  // namespace isobit
