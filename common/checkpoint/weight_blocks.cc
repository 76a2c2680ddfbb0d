// Checks that blocks cover every value of every tensor exactly once.
#include "common/checkpoint/weight_blocks.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/strict_json.h"  // Quoted

namespace isobit {
namespace {

constexpr size_t kMaxBlocks = 4096;      // of one tensor
constexpr int64_t kMaxStride = 1 << 30;  // values
constexpr int kMaxSenders = 1 << 16;

int64_t RowsOf(const Tensor& tensor) { return tensor.shape.empty() ? 1 : tensor.shape[0]; }
int64_t ColumnsOf(const Tensor& tensor) { return tensor.shape.size() < 2 ? 1 : tensor.shape[1]; }

bool IsWithin(int64_t first, int64_t count, int64_t all) {
  return first >= 0 && count > 0 && count <= all && first <= all - count;
}

bool Overlap(const WeightBlock& a, const WeightBlock& b) {
  return a.first_row < b.first_row + b.num_rows && b.first_row < a.first_row + a.num_rows &&
         a.first_column < b.first_column + b.num_columns &&
         b.first_column < a.first_column + a.num_columns;
}

absl::Status ValidateBlock(const WeightBlock& block, const WeightBlocks& all,
                           const std::vector<Tensor>& tensors) {
  if (block.tensor >= tensors.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", block.tensor, ", expected 0 to ", tensors.size() - 1));
  }
  const Tensor& tensor = tensors[block.tensor];
  if (!IsWithin(block.first_row, block.num_rows, RowsOf(tensor)) ||
      !IsWithin(block.first_column, block.num_columns, ColumnsOf(tensor))) {
    return absl::InvalidArgumentError(
        absl::StrCat(block.num_rows, " rows from ", block.first_row, " and ", block.num_columns,
                     " columns from ", block.first_column, ", expected some of tensor ",
                     Quoted(tensor.name), " [", RowsOf(tensor), ", ", ColumnsOf(tensor), "]"));
  }
  if (block.holder >= all.num_holders()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", Quoted(tensor.name), all.senders ? " of sender " : " in memory ", block.holder,
        ", expected one of the ", all.num_holders(), all.senders ? "" : " listed"));
  }
  if (block.offset % ItemSize(tensor.dtype) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(tensor.name), " from byte ",
                                                   block.offset, ", expected a multiple of ",
                                                   ItemSize(tensor.dtype)));
  }
  if (block.row_stride < block.num_columns || block.row_stride > kMaxStride) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Quoted(tensor.name), " with ", block.row_stride,
                     " values from row to row, expected ", block.num_columns, " to ", kMaxStride));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateBlocks(const WeightBlocks& blocks, const std::vector<Tensor>& tensors) {
  if (blocks.senders &&
      (blocks.senders->num_senders < 1 || blocks.senders->num_senders > kMaxSenders)) {
    return absl::InvalidArgumentError(absl::StrCat("weights by NCCL: ", blocks.senders->num_senders,
                                                   " senders, expected 1 to ", kMaxSenders));
  }
  std::vector<std::vector<const WeightBlock*>> of_tensor(tensors.size());
  for (size_t i = 0; i < blocks.blocks.size(); ++i) {
    const absl::Status valid = ValidateBlock(blocks.blocks[i], blocks, tensors);
    if (!valid.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("block ", i, ": ", valid.message()));
    }
    of_tensor[blocks.blocks[i].tensor].push_back(&blocks.blocks[i]);
  }
  for (size_t t = 0; t < tensors.size(); ++t) {
    std::vector<const WeightBlock*>& own = of_tensor[t];
    const auto wrong = [&](const std::string& why) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Quoted(tensors[t].name), ": ", why));
    };
    if (own.size() > kMaxBlocks) {
      return wrong(absl::StrCat(own.size(), " blocks, expected at most ", kMaxBlocks));
    }
    std::sort(own.begin(), own.end(), [](const WeightBlock* a, const WeightBlock* b) {
      return a->first_row < b->first_row;
    });
    int64_t values = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      values += own[i]->num_rows * own[i]->num_columns;
      const int64_t end = own[i]->first_row + own[i]->num_rows;
      for (size_t j = i + 1; j < own.size() && own[j]->first_row < end; ++j) {
        if (Overlap(*own[i], *own[j])) return wrong("some values come twice");
      }
    }
    const int64_t all = RowsOf(tensors[t]) * ColumnsOf(tensors[t]);
    if (values != all) return wrong(absl::StrCat(values, " of its ", all, " values are there"));
  }
  return absl::OkStatus();
}

}  // namespace isobit
