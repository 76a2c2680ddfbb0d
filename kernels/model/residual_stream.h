// The residual stream of a step on one rank: what row-parallel layers add to it, summed over the
// ranks, and the norms that read it. A large step is two halves whose sums travel by turns.
#ifndef ISOBIT_KERNELS_MODEL_RESIDUAL_STREAM_H_
#define ISOBIT_KERNELS_MODEL_RESIDUAL_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/all_reduce.h"
#include "kernels/growing_buffer.h"
#include "kernels/model/step_halves.h"
#include "kernels/ops.h"

namespace isobit {

// The rows of a step that are computed together: all, or those of one half (all_reduce.h).
struct StepPart {
  int64_t first_row = 0;
  int64_t rows = 0;
  SequenceTable sequences;
};

class ResidualStream {
 public:
  // `ops` and `all_reduce` outlive the object. all_reduce: null with one rank. hidden: columns;
  // eps: of the norms.
  ResidualStream(int64_t hidden, float eps, Ops& ops, AllReduce* all_reduce)
      : hidden_(hidden), eps_(eps), ops_(ops), all_reduce_(all_reduce) {}

  // Makes room for steps of `rows`. RESOURCE_EXHAUSTED: no memory.
  absl::Status Reserve(int64_t rows);
  // Bytes that Reserve(rows) takes at most, but for two biases.
  static size_t ReservedBytes(int64_t hidden, int64_t rows);

  // Begins a step of `rows` rows with its padding, in as many parts as its sums are best computed
  // in. page_size: of the KV cache that it uses.
  absl::Status Begin(const UploadedStep& step, int64_t rows, int32_t page_size);
  // One, or two halves. They are computed in this order, layer by layer.
  size_t num_parts() const { return parts_.size(); }
  const StepPart& part(size_t p) const { return parts_[p].step; }

  // [rows, hidden], where the embedding goes.
  Bf16* data() const { return residual_.data(); }

  // Adds what the last row-parallel layer has left for part p, if any, and normalises the part's
  // rows with `weight` [hidden]. The result [part.rows, hidden] is in `out`, or elsewhere if the
  // part's sum has travelled; until the part's next Add.
  absl::StatusOr<const Bf16*> Norm(size_t p, const Bf16* weight, Bf16* out);
  // The same into memory of the stream.
  absl::StatusOr<const Bf16*> Norm(size_t p, const Bf16* weight) {
    return Norm(p, weight, normed_.data() + parts_[p].step.first_row * hidden_);
  }

  // Does what Norm will do first for the part before p in the order of computation, so that its
  // sums travel while p is computed. weight: of that Norm. Nothing if there is none.
  absl::Status SumPartBefore(size_t p, const Bf16* weight);

  // Computes a row-parallel layer: this rank's partial sums of x W^T for the rows of part p, which
  // the part's next Norm adds, with `bias` [hidden] or null. x: [part.rows, weight.shape.k].
  absl::Status Add(size_t p, const Bf16* x, const LinearWeight& weight, const float* bias);

 private:
  struct Part {
    StepPart step;
    // The last row-parallel result and its bias, until they are added.
    const std::byte* partial = nullptr;
    const float* bias = nullptr;
    bool travels = false;  // between OverlappedSum's Send and Receive
  };

  // OverlappedSum's Sum, unless it was called.
  absl::Status Sum(size_t p, const Bf16* weight);
  RmsNormArgs NormArgs(const Part& part, const Bf16* weight, Bf16* out) const;
  bool has_bf16_partials() const { return all_reduce_ != nullptr && all_reduce_->takes_bf16(); }

  const int64_t hidden_;
  const float eps_;
  Ops& ops_;
  AllReduce* const all_reduce_;

  GrowingBuffer<Bf16> residual_, normed_;
  // Of fp32 or bf16 sums; a double buffer, since a peer may still read the last one
  // (AllReduce::Norm).
  GrowingBuffer<std::byte> partial_[2];
  int turn_ = 0;
  // Copies, one a part: the block that a bias came from may be released before the norm that adds
  // it.
  GrowingBuffer<float> bias_;

  // Of the present step.
  std::vector<Part> parts_;
  StepHalves halves_;                    // what the sequences of two parts point to
  OverlappedSum* overlapped_ = nullptr;  // null: one part
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_RESIDUAL_STREAM_H_
