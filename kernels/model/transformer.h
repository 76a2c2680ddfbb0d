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
                                        Ops& ops);
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
    absl::StatusOr<T*> Reserve(Ops& ops, int64_t elements);
    T* data() const { return reinterpret_cast<T*>(memory_.get()); }

   private:
    Memory memory_;
    size_t bytes_ = 0;
  };

  absl::Status ShareRope();
  absl::Status Layer(int layer, int64_t rows, const SequenceTable& sequences, const LayerWeights& w,
                     const KvCache& cache);
  // A row-parallel layer: this rank's partial sums, which the next Norm takes, then its bias into
  // bias_.
  absl::Status RowParallel(const Bf16* x, const LinearWeight& weight, const float* bias,
                           int64_t rows);
  // Takes the last row-parallel result, if any, into the residual stream and normalises it.
  absl::Status Norm(const Bf16* weight, int64_t rows, Bf16* out);
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
  // A copy: the block that a bias came from may be released before the norm that adds it.
  Buffer<float> bias_;
  // The last row-parallel result and its bias, while they have not joined the residual stream.
  const std::byte* pending_partial_ = nullptr;
  const float* pending_bias_ = nullptr;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_TRANSFORMER_H_
