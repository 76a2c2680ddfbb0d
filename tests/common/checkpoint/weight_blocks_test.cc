// Which lists of blocks are refused, and that the message names what is wrong.
#include "common/checkpoint/weight_blocks.h"

#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing_support::StatusIs;

std::vector<Tensor> Tensors() {
  Tensor matrix;
  matrix.name = "matrix";
  matrix.dtype = DType::kF32;
  matrix.shape = {6, 8};
  Tensor vector;
  vector.name = "vector";
  vector.dtype = DType::kBf16;
  vector.shape = {5};
  return {matrix, vector};
}

WeightBlocks Whole() {
  WeightBlocks blocks;
  blocks.handles.resize(2);
  blocks.blocks = {{.tensor = 0, .num_rows = 4, .num_columns = 8, .holder = 0, .row_stride = 8},
                   {.tensor = 0,
                    .first_row = 4,
                    .num_rows = 2,
                    .num_columns = 4,
                    .holder = 1,
                    .offset = 12,
                    .row_stride = 9},
                   {.tensor = 0,
                    .first_row = 4,
                    .num_rows = 2,
                    .first_column = 4,
                    .num_columns = 4,
                    .holder = 1,
                    .row_stride = 4},
                   {.tensor = 1, .num_rows = 5, .num_columns = 1, .holder = 1, .row_stride = 1}};
  return blocks;
}

TEST(WeightBlocksTest, TakesBlocksThatHoldEachValueOnce) {
  ISOBIT_EXPECT_OK(ValidateBlocks(Whole(), Tensors()));
}

TEST(WeightBlocksTest, NamesWhatIsWrong) {
  struct Case {
    std::function<void(std::vector<WeightBlock>&)> change;
    std::string says;
  };
  const std::vector<Case> cases = {
      {[](auto& b) { b.pop_back(); }, "\"vector\": 0 of its 5 values"},
      {[](auto& b) { b[0].num_rows = 3; }, "\"matrix\": 40 of its 48 values"},
      {[](auto& b) { b.push_back(b[1]); }, "\"matrix\": some values come twice"},
      {[](auto& b) { b[1].first_row = 3; }, "\"matrix\": some values come twice"},
      {[](auto& b) { b[0].tensor = 2; }, "block 0: tensor 2, expected 0 to 1"},
      {[](auto& b) { b[0].num_rows = 7; }, "block 0: 7 rows from 0"},
      {[](auto& b) { b[0].num_rows = -1; }, "block 0: -1 rows"},
      {[](auto& b) { b[2].first_column = INT64_MAX; }, "block 2: 2 rows from 4 and 4 columns"},
      {[](auto& b) { b[3].num_columns = 2; }, "some of tensor \"vector\" [5, 1]"},
      {[](auto& b) { b[1].holder = 2; }, "memory 2, expected one of the 2"},
      {[](auto& b) { b[1].offset = 6; }, "from byte 6, expected a multiple of 4"},
      {[](auto& b) { b[0].row_stride = 7; }, "7 values from row to row"},
      {[](auto& b) { b[0].row_stride = INT64_MAX; }, "values from row to row"},
  };
  for (const Case& wrong : cases) {
    WeightBlocks blocks = Whole();
    wrong.change(blocks.blocks);
    EXPECT_THAT(ValidateBlocks(blocks, Tensors()),
                StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr(wrong.says)));
  }
}

TEST(WeightBlocksTest, SendersHoldBlocksToo) {
  WeightBlocks blocks = Whole();
  blocks.handles.clear();
  blocks.senders = {.num_senders = 2};
  ISOBIT_EXPECT_OK(ValidateBlocks(blocks, Tensors()));
  blocks.senders->num_senders = 1;
  EXPECT_THAT(ValidateBlocks(blocks, Tensors()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       testing::HasSubstr("of sender 1, expected one of the 1")));
  for (const int count : {-1, 0, 65'537}) {
    blocks.senders->num_senders = count;
    EXPECT_THAT(
        ValidateBlocks(blocks, Tensors()),
        StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("expected 1 to 65536")));
  }
}

TEST(WeightBlocksTest, BoundsTheBlocksOfATensor) {
  std::vector<Tensor> tensors = {Tensors()[1]};
  tensors[0].shape = {5000};
  WeightBlocks blocks;
  blocks.handles.resize(1);
  for (int64_t row = 0; row < 5000; ++row) {
    blocks.blocks.push_back({.first_row = row, .num_rows = 1, .num_columns = 1, .row_stride = 1});
  }
  EXPECT_THAT(ValidateBlocks(blocks, tensors),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("at most 4096")));
}

}  // namespace
}  // namespace isobit
