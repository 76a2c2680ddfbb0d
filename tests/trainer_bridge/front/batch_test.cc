// The rows, packs and slots of the C++ front's batches, and what it refuses.
#include "trainer_bridge/front/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/status_matchers.h"

namespace isobit::front {
namespace {

using testing::ElementsAre;
using testing_support::IsOk;

std::vector<int64_t> ValuesOf(const torch::Tensor& t) {
  const torch::Tensor wide = t.to(torch::kInt64);
  return {wide.data_ptr<int64_t>(), wide.data_ptr<int64_t>() + wide.numel()};
}

TEST(MakeBatchTest, LaysOutRowsAndPacks) {
  const std::vector<TrainingSequence> sequences = {
      {.ids = {7, 3, 7}}, {.ids = {3}}, {.ids = {5, 7, 9}, .prompt_length = 2, .top_k = 4}};
  const auto batch = MakeBatch(sequences, {2, 0, 1, 0});
  ASSERT_THAT(batch, IsOk());
  EXPECT_THAT(ValuesOf(batch->ids), ElementsAre(7, 3, 7, 3, 5, 7, 9));
  EXPECT_THAT(ValuesOf(batch->positions), ElementsAre(0, 1, 2, 0, 0, 1, 2));
  EXPECT_THAT(batch->sequences, ElementsAre(0, 3, 4, 7));
  EXPECT_THAT(batch->packs, ElementsAre(0, 4, 4, 7, 7));
  EXPECT_THAT(ValuesOf(batch->scored), ElementsAre(0, 1, 5));
  EXPECT_THAT(ValuesOf(batch->targets), ElementsAre(3, 7, 9));
  EXPECT_THAT(batch->scored_packs, ElementsAre(0, 2, 2, 3, 3));
  EXPECT_THAT(ValuesOf(batch->unique_ids), ElementsAre(3, 5, 7, 9));
  EXPECT_THAT(ValuesOf(batch->starts), ElementsAre(0, 2, 3, 6, 7));
  EXPECT_THAT(ValuesOf(batch->rows_by_id), ElementsAre(1, 3, 4, 0, 2, 5, 6));
  EXPECT_THAT(ValuesOf(batch->sampling.top_k), ElementsAre(0, 0, 4));
  EXPECT_FALSE(batch->sampling.temperature.defined());
  EXPECT_EQ(batch->max_length, 3);
  EXPECT_EQ(batch->max_id, 9);
}

TEST(MakeBatchTest, SaysWhatABatchMustBe) {
  const auto message = [](const std::vector<TrainingSequence>& sequences,
                          const std::vector<int64_t>& packs) {
    return std::string(MakeBatch(sequences, packs).status().message());
  };
  EXPECT_EQ(message({}, {0}), "expected at least one sequence");
  EXPECT_EQ(message({{.ids = {1, 2}, .prompt_length = 3}}, {1}),
            "sequence 0: expected a prompt of 1 to 2 tokens (all it has), got 3");
  EXPECT_EQ(message({{.ids = {1, -2}}}, {1}), "sequence 0: a token is negative");
  EXPECT_EQ(message({{.ids = {1}}, {.ids = {1, 2}, .temperature = -1}}, {2}),
            "sequence 1: temperature: expected 0, or 0.001 to 1000, got -1");
  EXPECT_EQ(message({{.ids = {1, 2}, .temperature = NAN}}, {1}),
            "sequence 0: temperature: expected 0, or 0.001 to 1000, got nan");
  EXPECT_EQ(message({{.ids = {1, 2}, .top_k = -2}}, {1}),
            "sequence 0: top_k: expected an integer from -1 on, got -2");
  EXPECT_EQ(message({{.ids = {1, 2}, .top_p = 0}}, {1}),
            "sequence 0: top_p: expected above 0, up to 1, got 0");
  EXPECT_EQ(message({{.ids = {1, 2}, .min_p = 1.5f}}, {1}),
            "sequence 0: min_p: expected 0 to 1, got 1.5");
  EXPECT_EQ(message({{.ids = {1, 2}}}, {1, 0, 0}),
            "expected a power of two up to 64 of packs, got 3");
  EXPECT_EQ(message({{.ids = {1, 2}}}, {2}), "expected packs of 1 sequences in all, got 2");
  EXPECT_EQ(message({{.ids = {1, 2}}}, {2, -1}), "a pack has a negative number of sequences");
}

TEST(CutIntoSlotsTest, FollowsTheDefinition) {
  const auto slots = CutIntoSlots({5, 5, 1, 12, 3, 7, 1}, 10, 2);
  ASSERT_THAT(slots, IsOk());
  EXPECT_THAT(*slots, ElementsAre(ElementsAre(2, 1), ElementsAre(1, 2), ElementsAre(1, 0)));
  EXPECT_THAT(*CutIntoSlots({5, 5, 1}, 10), ElementsAre(ElementsAre(2, 1, 0, 0, 0, 0, 0, 0)));
}

TEST(CutIntoSlotsTest, RefusesWhatIsOutOfRange) {
  EXPECT_EQ(CutIntoSlots({5}, 0).status().message(), "pack_tokens: expected at least 1, got 0");
  EXPECT_EQ(CutIntoSlots({5, 0}, 10).status().message(), "lengths: expected at least 1, got 0");
  EXPECT_EQ(CutIntoSlots({5}, 10, 3).status().message(),
            "lanes: expected a power of two from 1 to 64, got 3");
}

}  // namespace
}  // namespace isobit::front
