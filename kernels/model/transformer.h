// The one forward pass that rollout and scorer run: a decoder-only transformer on one
// tensor-parallel rank.
#ifndef ISOBIT_KERNELS_MODEL_TRANSFORMER_H_
#define ISOBIT_KERNELS_MODEL_TRANSFORMER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/parallel/communicator.h"
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
  // keeps nothing.
  KvCache(const ModelConfig& config, const RankShape& shape, int32_t num_pages, int32_t page_size,
          bool shared_layers);
  PagedKv layer(int layer) const;
  int32_t num_pages() const { return num_pages_; }
  int32_t page_size() const { return geometry_.page_size; }
  // Bytes of one page over all layers.
  size_t page_bytes() const { return page_bytes_; }

 private:
  PagedKv geometry_;  // pointers null
  int32_t num_pages_;
  size_t page_bytes_;
  size_t layer_elements_;  // of k, and of v
  bool shared_layers_;
  AlignedBytes memory_;
};

// Not thread safe: one object and one thread per rank; all ranks of `comm` make the same calls with
// the same batch.
class Transformer {
 public:
  // All arguments outlive the object. `rope` covers every position that a batch will have.
  Transformer(const WeightLayout& layout, const contract::RopeTable& rope, NumericsMode mode,
              Ops& ops, Communicator& comm);

  // Runs every layer and the final norm. hidden: [rows, hidden_size] bf16, the same on every rank.
  absl::Status Forward(const Batch& batch, WeightSource& weights, const KvCache& cache,
                       Bf16* hidden);

  // logits[r, v] for the rank's vocabulary range: writes columns shape().vocab of logits [rows,
  // vocab_size] fp32, leading dimension ld. hidden: [rows, hidden_size].
  absl::Status Logits(const Bf16* hidden, int64_t rows, WeightSource& weights, float* logits,
                      int64_t ld);

 private:
  absl::Status Layer(int layer, const Batch& batch, const LayerWeights& w, const KvCache& cache);
  // A row-parallel layer: this rank's partial sums, then the cross-rank sum into sum_, then its
  // bias into bias_.
  absl::Status RowParallel(const Bf16* x, const LinearWeight& weight, const float* bias,
                           int64_t rows);
  // Takes the last row-parallel result, if any, into the residual stream and normalises it.
  absl::Status Norm(const Bf16* weight, int64_t rows, Bf16* out);

  const WeightLayout& layout_;
  const contract::RopeTable& rope_;
  const NumericsMode mode_;
  Ops& ops_;
  Communicator& comm_;

  // Activations of the present batch; they grow and never shrink.
  std::vector<Bf16> residual_, normed_, qkv_, attended_, gate_up_, activated_;
  std::vector<float>
      partial_[2];  // in turn, since a peer may still read the last one (Communicator::Gather)
  int turn_ = 0;
  std::vector<float> sum_;
  std::vector<float>
      bias_;  // a copy: the block it came from may be released before the norm that adds it
  bool pending_ = false;  // sum_ has not yet joined the residual stream
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_TRANSFORMER_H_
