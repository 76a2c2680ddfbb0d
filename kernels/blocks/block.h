// One block of a model: it reads the normalised residual stream and adds to it. A decoder layer is
// usually two blocks, such as attention and a gated MLP, but a model is any list of blocks between
// an embedding and a head (kernels/model/model_plan.h).
//
// A block is a value: it knows its parameters, the memory that a sequence's past takes in it, and
// its forward pass, and has no weights. Not here: the norm before the block, sums over ranks, when
// weights are fetched (kernels/model/transformer.h).
#ifndef ISOBIT_KERNELS_BLOCKS_BLOCK_H_
#define ISOBIT_KERNELS_BLOCKS_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/blocks/block_weights.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/blocks/residual_stream.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/linear_shape.h"
#include "kernels/ops/op_table.h"

namespace isobit {

// What a block keeps of a sequence's past on one rank. Either kind may be absent.
//   pages: something for each position, such as keys and values, in one or more planes;
//   a slot: one thing for the whole past, such as a recurrent state, which each step replaces.
struct StateSpec {
  int32_t num_planes = 0;
  size_t plane_bytes = 0;  // of one position in each plane
  size_t slot_bytes = 0;   // of one sequence
  // A slot that has been extended to row n also serves to go on from any row r < n with
  // r / slot_rows == n / slot_rows. 1: from n alone.
  int32_t slot_rows = 1;

  size_t bytes() const { return static_cast<size_t>(num_planes) * plane_bytes; }  // of a position
};

// A block's memory on a rank. Position p of a sequence is in its page p / page_size of each plane.
// A step reads and writes the slots that SequenceRows says; a slot's first content is undefined.
struct BlockState {
  std::byte* planes = nullptr;  // the first plane
  size_t plane_stride = 0;      // bytes from one plane to the next
  int32_t page_size = 0;
  std::byte* slots = nullptr;  // the first slot
  size_t slot_stride = 0;      // bytes from one slot to the next, a multiple of kSlotAlignment
};
inline constexpr size_t kSlotAlignment = 256;

// The rotary table, in the backend's memory: [max_positions, head_dim / 2].
struct Rope {
  const float* cosine = nullptr;
  const float* sine = nullptr;
};

// A block's rows of one step, or of one half of it, on one rank.
struct BlockPass {
  const OpTable& ops;
  const RankShape& rank;
  const BlockWeights& weights;
  const Rope& rope;
  BlockState state;
  size_t half;
  const StepRows& rows;
  const Bf16* normed;                   // [rows, hidden_size]
  absl::Span<Bf16* const> activations;  // the rows' begin in each matrix of Activations
  ResidualStream& residual;

  // Adds x W^T and the bias, which may be null, to the residual stream. x: [rows, weight.shape.k],
  // this rank's columns. Call it once.
  absl::Status Add(const Bf16* x, const LinearWeight& weight, const float* bias) const {
    return residual.Add(half, x, weight, bias);
  }
};

class Block {
 public:
  virtual ~Block() = default;

  // Such as "attention": the name under which trainers find the block's forward and backward pass.
  const char* kind() const { return kind_; }
  // The decoder layer whose part it is, counted from 0, and its place among the layer's blocks.
  int layer() const { return layer_; }
  int index_in_layer() const { return index_in_layer_; }
  // The RMSNorm weight [hidden_size] with which the residual stream is normalised for this block.
  ParameterIndex norm() const { return norm_; }

  virtual StateSpec State(const RankShape& /*rank*/) const { return {}; }

  // The columns of the bf16 matrices that Forward needs, one row for each row of a step. Blocks use
  // the same memory one after the other.
  virtual std::vector<int64_t> Activations(const BlockWeights& shapes) const = 0;

  // Computes the rows from `pass.normed`, and calls pass.Add. Errors: those of the ops.
  virtual absl::Status Forward(const BlockPass& pass) const = 0;

 protected:
  Block(const char* kind, int layer, int index_in_layer)
      : kind_(kind), layer_(layer), index_in_layer_(index_in_layer) {}

  ParameterIndex norm_ = kNoParameter;

 private:
  const char* const kind_;
  const int layer_;
  const int index_in_layer_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_BLOCK_H_
