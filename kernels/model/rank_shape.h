// What one tensor-parallel rank owns of every layer: whole leaves (C4), so nothing needs to divide.
#ifndef ISOBIT_KERNELS_MODEL_RANK_SHAPE_H_
#define ISOBIT_KERNELS_MODEL_RANK_SHAPE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "kernels/ops.h"

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
  Interval kv_heads;      // of num_kv_heads; each brings its num_heads / num_kv_heads query heads
  Interval intermediate;  // columns of down_proj, rows of gate_proj and up_proj
  Interval vocab;         // rows of lm_head
  int64_t heads = 0;      // query heads on this rank

  LinearShape qkv;      // [(heads + 2 kv_heads) * head_dim, hidden]
  LinearShape o;        // [hidden, heads * head_dim], row-parallel
  LinearShape gate_up;  // [2 * intermediate, hidden]: gates, then ups
  LinearShape down;     // [hidden, intermediate], row-parallel
  LinearShape head;     // [vocab, hidden]
};

// INVALID_ARGUMENT: size is not 1, 2, 4 or 8, or rank is not in [0, size).
absl::StatusOr<RankShape> ShapeOfRank(const ModelConfig& config, int rank, int size);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_RANK_SHAPE_H_
