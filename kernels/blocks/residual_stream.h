// The residual stream of a step on one rank: row-parallel layers add to it, summed over the ranks,
// and norms read it. A large step is computed in two halves: while the sums of one half travel
// between the ranks, the other half is computed (micro-batch overlap).
#ifndef ISOBIT_KERNELS_BLOCKS_RESIDUAL_STREAM_H_
#define ISOBIT_KERNELS_BLOCKS_RESIDUAL_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/all_reduce.h"
#include "kernels/backend.h"
#include "kernels/blocks/step_halves.h"
#include "kernels/contract/portable.h"
#include "kernels/growing_buffer.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/step_tables.h"
#include "kernels/weight_packer.h"

namespace isobit {

// The rows of a step that are computed together: those of one half, or of an undivided step.
struct StepRows {
  int64_t first_row = 0;
  int64_t rows = 0;
  SequenceTable sequences;
};

class ResidualStream {
 public:
  // `ops` and `all_reduce` outlive the object. all_reduce: null with one rank. hidden: the number
  // of columns. eps: that of the norms. num_blocks: how many add in a step; with several ranks more
  // than one.
  ResidualStream(int64_t hidden, float eps, size_t num_blocks, Backend& ops, AllReduce* all_reduce);

  // From now on uses the memory of `other`, which has the same model and device. The steps of the
  // two must not overlap in time.
  void ShareMemory(const ResidualStream& other) { buffers_ = other.buffers_; }
  // Allocates memory for steps of `rows`. RESOURCE_EXHAUSTED: there is none.
  absl::Status Reserve(int64_t rows);
  // Upper bound of what Reserve(rows) allocates, without the copies of two biases.
  static size_t ReservedBytes(int64_t hidden, size_t num_blocks, int64_t rows);

  // Begins a step of `rows` rows, including padding. Divides it into halves if may_cut allows it
  // and the all-reduce gains by that. page_size: of the KV cache that the step uses.
  absl::Status Begin(const UploadedStep& step, int64_t rows, int32_t page_size, bool may_cut);
  // 1: the step is undivided, and its only "half" has all rows. 2: the halves are computed in this
  // order, layer by layer.
  size_t num_halves() const { return halves_.size(); }
  const StepRows& half(size_t h) const { return halves_[h].step; }

  // [rows, hidden], where the embedding is written.
  Bf16* data() const { return buffers_->residual.data(); }

  // Begins a block. norm [hidden]: the weight of its norm. next_norm: that of the norm after the
  // block, if the step is in halves; otherwise it is not used.
  void BeginBlock(const Bf16* norm, const Bf16* next_norm) {
    norm_ = norm;
    next_norm_ = next_norm;
    ++num_begun_;
  }

  // Adds the half's last row-parallel result, if there is one, to the residual, and normalises the
  // half's rows with the block's norm. Returns where the result [half.rows, hidden] is until the
  // half's next Add: `out`, or other memory if the sums came from the other ranks.
  absl::StatusOr<const Bf16*> Norm(size_t h, Bf16* out);
  // The same, into memory of this object.
  absl::StatusOr<const Bf16*> Norm(size_t h) {
    return Norm(h, buffers_->normed.data() + halves_[h].step.first_row * hidden_);
  }

  // Computes a row-parallel layer: this rank's partial sums of x W^T for the rows of half h. The
  // half's next Norm adds them, and `bias` [hidden] if it is not null. x: [half.rows,
  // weight.shape.k].
  absl::Status Add(size_t h, const Bf16* x, const LinearWeight& weight, const float* bias);

 private:
  struct Buffers {
    GrowingBuffer<Bf16> residual, normed;
    // fp32 or bf16 sums. Blocks take turns, since a peer may still read those of the block before
    // (AllReduce::Norm), also when the next step begins: the last of an odd number of blocks has
    // the third one.
    GrowingBuffer<std::byte> partial[3];
    // A copy for each half: the weight block with a bias may be released before the norm adds the
    // bias.
    GrowingBuffer<float> bias;
  };
  struct Half {
    StepRows step;
    // The last row-parallel result and its bias, until they are added.
    const std::byte* partial = nullptr;
    const float* bias = nullptr;
    bool travels = false;  // between OverlappedSum's Send and Receive
  };

  // Starts the sum of the half that was computed before half h, so that it travels while half h is
  // computed; otherwise that half's Norm starts it. Does nothing if no sum waits.
  absl::Status SumHalfBefore(size_t h);
  // OverlappedSum's Sum, if not yet called. weight: the one of the norm after it.
  absl::Status Sum(size_t h, const Bf16* weight);
  RmsNormArgs NormArgs(const Half& half, const Bf16* weight, Bf16* out) const;
  bool has_bf16_partials() const { return all_reduce_ != nullptr && all_reduce_->takes_bf16(); }

  const int64_t hidden_;
  const float eps_;
  const size_t num_blocks_;
  Backend& ops_;
  AllReduce* const all_reduce_;

  std::shared_ptr<Buffers> buffers_ = std::make_shared<Buffers>();

  // Of the current step.
  std::vector<Half> halves_;
  StepHalves cut_;                       // what the sequences of two halves point to
  OverlappedSum* overlapped_ = nullptr;  // null: the step is undivided
  size_t num_begun_ = 0;                 // blocks, with the current one
  const Bf16* norm_ = nullptr;           // of the current block
  const Bf16* next_norm_ = nullptr;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_RESIDUAL_STREAM_H_
