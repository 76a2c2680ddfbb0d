// The one forward pass that rollout and scorer run: a decoder-only transformer on one
// tensor-parallel rank.
#ifndef ISOBIT_KERNELS_MODEL_TRANSFORMER_H_
#define ISOBIT_KERNELS_MODEL_TRANSFORMER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/all_reduce.h"
#include "kernels/contract/rope.h"
#include "kernels/model/step_halves.h"
#include "kernels/model/weights.h"
#include "kernels/ops.h"

namespace isobit {

// Token rows of one step. Sequences cover the rows in order; each is a whole prompt or one new
// token.
struct Batch {
  std::vector<int32_t> ids;  // [rows], each in [0, vocab_size)
  std::vector<SequenceRows> sequences;
};

// One rank's KV cache: a page number means the same page in every layer.
class KvCache {
 public:
  // shared_layers: all layers use one layer's memory, for a pass that computes whole sequences and
  // keeps nothing. RESOURCE_EXHAUSTED: it does not fit into the backend's memory.
  static absl::StatusOr<KvCache> Create(const ModelConfig& config, const RankShape& shape,
                                        int32_t num_pages, int32_t page_size, bool shared_layers,
                                        Device& device);
  // Bytes of one page over all layers, each with memory of its own.
  static size_t PageBytes(const ModelConfig& config, const RankShape& shape, int32_t page_size);

  PagedKv layer(int layer) const;
  int32_t num_pages() const { return num_pages_; }
  int32_t page_size() const { return geometry_.page_size; }
  size_t bytes() const { return bytes_; }

 private:
  KvCache() = default;

  PagedKv geometry_;  // pointers null
  int32_t num_pages_ = 0;
  size_t bytes_ = 0;
  size_t layer_elements_ = 0;  // of k, and of v
  bool shared_layers_ = false;
  Memory memory_;
};

// Not thread safe: one object and one thread per rank; all ranks make the same calls with the same
// batch.
class Transformer {
 public:
  // All arguments outlive the object. `rope` covers every position that a batch will have.
  // `all_reduce`: null with one rank.
  Transformer(const WeightLayout& layout, const contract::RopeTable& rope, NumericsMode mode,
              Ops& ops, AllReduce* all_reduce);

  // Makes room for batches of `rows`, so that they allocate nothing: what a captured graph needs.
  // RESOURCE_EXHAUSTED: no memory.
  absl::Status Reserve(int64_t rows);
  // Bytes that Reserve(rows) takes at most, but for the rotary table and one bias.
  static size_t ReservedBytes(const WeightLayout& layout, int64_t rows);

  // Runs every layer and the final norm. hidden: [rows, hidden_size] bf16, the same on every rank.
  // The batch must stay as it is until the ops have ended.
  absl::Status Forward(const Batch& batch, WeightSource& weights, const KvCache& cache,
                       Bf16* hidden);

  // The same for a step that has been staged, of `rows` rows with its padding.
  absl::Status Forward(const StagedStep& step, int64_t rows, WeightSource& weights,
                       const KvCache& cache, Bf16* hidden);

  // The rank's columns of the logits, shape().vocab, fp32: logits [rows, shape().vocab.size()],
  // leading dimension ld. hidden: [rows, hidden_size].
  absl::Status Logits(const Bf16* hidden, int64_t rows, WeightSource& weights, float* logits,
                      int64_t ld);

 private:
  // A buffer of the backend's memory that grows and never shrinks.
  template <typename T>
  class Buffer {
   public:
    absl::StatusOr<T*> Reserve(Device& device, int64_t elements);
    T* data() const { return reinterpret_cast<T*>(memory_.get()); }

   private:
    Memory memory_;
    size_t bytes_ = 0;
  };

  // The rows of a step that are computed together: all, or those of one half (all_reduce.h).
  struct Part {
    int64_t first_row = 0;
    int64_t rows = 0;
    SequenceTable sequences;
    // The last row-parallel result and its bias, until they join the residual stream.
    const std::byte* partial = nullptr;
    const float* bias = nullptr;
    bool travels = false;  // between OverlappedSum's Send and Receive
  };

  absl::Status ShareRope();
  // Sets parts_ and overlapped_.
  absl::Status CutIntoParts(const StagedStep& step, int64_t rows, int32_t page_size);
  // next_norm: the weight of the norm after this layer, if the step is in halves.
  absl::Status Layer(int layer, const BlockWeights& w, const Bf16* next_norm, const KvCache& cache);
  // A row-parallel layer: this rank's partial sums, for Normalise, with its bias in bias_.
  absl::Status RowParallel(size_t p, const Bf16* x, const LinearWeight& weight, const float* bias);
  // Takes the part's last row-parallel result, if any, into the residual stream and normalises it:
  // in `out`, or where the result says.
  absl::StatusOr<const Bf16*> Normalise(size_t p, const Bf16* weight, Bf16* out);
  // Does what Normalise will do first for the half before p, so that its rows travel while p is
  // computed. Nothing if there is none.
  absl::Status SumHalfBefore(size_t p, const Bf16* weight);
  // OverlappedSum's Sum, unless it was called.
  absl::Status Sum(size_t p, const Bf16* weight);
  RmsNormArgs NormArgs(const Part& part, const Bf16* weight, Bf16* out) const;
  bool has_bf16_partials() const { return all_reduce_ != nullptr && all_reduce_->takes_bf16(); }

  const WeightLayout& layout_;
  const contract::RopeTable& rope_;
  const NumericsMode mode_;
  Ops& ops_;
  AllReduce* const all_reduce_;  // null: one rank

  std::shared_ptr<const std::byte> cosine_, sine_;  // the tables of rope_
  // Activations of the present batch.
  Buffer<Bf16> residual_, normed_, qkv_, attended_, activated_;
  // Of fp32 or bf16 sums; in turn, since a peer may still read the last one (AllReduce::Norm).
  Buffer<std::byte> partial_[2];
  int turn_ = 0;
  // Copies, one a part: the block that a bias came from may be released before the norm that adds
  // it.
  Buffer<float> bias_;

  // Of the present step.
  std::vector<Part> parts_;              // one, or two halves
  StepHalves halves_;                    // what the sequences of two parts point to
  OverlappedSum* overlapped_ = nullptr;  // null: one part
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_TRANSFORMER_H_
