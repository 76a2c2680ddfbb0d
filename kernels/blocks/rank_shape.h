// What one tensor-parallel rank has of a model: whole leaves (C4), so head counts and widths need
// not be divisible by the number of ranks.
#ifndef ISOBIT_KERNELS_BLOCKS_RANK_SHAPE_H_
#define ISOBIT_KERNELS_BLOCKS_RANK_SHAPE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/ops/linear_shape.h"

namespace isobit {

// [begin, end)
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

struct RankShape {
  int rank = 0;
  int size = 1;
  Interval kv_heads;  // of num_kv_heads; with num_heads / num_kv_heads query heads each
  Interval vocab;     // rows of lm_head, columns of the logits
  int64_t heads = 0;  // query heads on this rank
};

// INVALID_ARGUMENT: `size` ranks are not allowed (rank_count.h), or rank is not in [0, size).
absl::StatusOr<RankShape> ShapeOfRank(const ModelConfig& config, int rank, int size);

// A rank's rows and columns of a tensor; a vector is a matrix of one column.
struct Slice {
  Interval rows;
  Interval columns;
};
// `tensor`: one of the parameter's tensors.
Slice SliceOf(const Parameter& parameter, const TensorSpec& tensor, const RankShape& rank);

// The rank's slice of a linear layer: the slices of its tensors, stacked.
LinearShape LinearOf(const Parameter& parameter, const RankShape& rank);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_RANK_SHAPE_H_
