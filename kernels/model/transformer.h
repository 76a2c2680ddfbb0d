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
#include "kernels/model/forward_probe.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/residual_stream.h"
#include "kernels/model/weights.h"
#include "kernels/ops.h"

namespace isobit {

// Token rows of one step. Sequences cover the rows in order. Several may share pages: a layer
// writes the keys and values of all rows before attention reads any, and a sequence that reads what
// this step writes comes after the one that writes it.
struct Batch {
  std::vector<int32_t> ids;  // [rows], each in [0, vocab_size)
  std::vector<SequenceRows> sequences;
  bool writes_past = false;  // as in StepTables::Upload
};

// Not thread safe: one object and one thread per rank; all ranks make the same calls with the same
// batch.
class Transformer {
 public:
  // All arguments outlive the object. `rope` covers every position that a batch will have.
  // `all_reduce`: null with one rank.
  Transformer(const WeightLayout& layout, const contract::RopeTable& rope, Ops& ops,
              AllReduce* all_reduce);

  // From now on the activations are in the memory of `other`, of the same model and device. The
  // passes of the two follow each other.
  void ShareMemory(const Transformer& other);

  // Makes room for batches of `rows`, so that they allocate nothing: what a captured graph needs.
  // RESOURCE_EXHAUSTED: no memory.
  absl::Status Reserve(int64_t rows);
  // The most bytes that Reserve(rows) takes, without the rotary table and two biases.
  static size_t ReservedBytes(const WeightLayout& layout, int64_t rows);

  // Runs every layer and the final norm. hidden: [rows, hidden_size] bf16, the same on every rank.
  // The batch must not change until the ops have ended.
  absl::Status Forward(const Batch& batch, WeightSource& weights, const KvCache& cache,
                       Bf16* hidden);

  // The same for a step that was uploaded, of `rows` rows, padding included.
  absl::Status Forward(const UploadedStep& step, int64_t rows, WeightSource& weights,
                       const KvCache& cache, Bf16* hidden);

  // From now on `probe` sees what Forward computes, for which the batch must be one sequence; null:
  // nobody does. A pass without a probe costs a look at the pointer an op. Before a probed pass of
  // `rows` PrepareProbe takes memory, which DropProbe gives back. RESOURCE_EXHAUSTED: there is
  // none.
  void SetProbe(ForwardProbe* probe) { probe_ = probe; }
  absl::Status PrepareProbe(int64_t rows);
  void DropProbe() { gate_up_ = {}; }

  // The rank's columns of the logits, shape().vocab, fp32: logits [rows, shape().vocab.size()],
  // leading dimension ld. hidden: [rows, hidden_size].
  absl::Status Logits(const Bf16* hidden, int64_t rows, WeightSource& weights, float* logits,
                      int64_t ld);

 private:
  struct Activations {  // of the present batch
    GrowingBuffer<Bf16> qkv, attended, activated;
  };

  absl::Status ShareRope();
  // For the probe: the residual and the norm of it, after the sums of the op before.
  absl::Status SeeNorm(const ProbeSite& sum, const ProbeSite& norm, const Bf16* normed);
  // next_norm: if the step is in halves, the weight of the norm after this layer; else null.
  absl::Status Layer(int layer, const BlockWeights& w, const Bf16* next_norm, const KvCache& cache);
  // The pieces of a layer, for the rows of `half`. normed: [half.rows, hidden_size].
  // activations_->qkv = the queries, keys and values. Keys and values go into the cache, too.
  absl::Status Qkv(const StepRows& half, int layer, const BlockWeights& w, const Bf16* normed,
                   const PagedKv& kv);
  // Attention of the half's rows over the cache, into activations_->attended. Returns the half's
  // first row there.
  absl::StatusOr<const Bf16*> Attend(const StepRows& half, int layer, const BlockWeights& w,
                                     const PagedKv& kv);
  // The MLP up to its activation, into activations_->activated. Returns the half's first row there.
  absl::StatusOr<const Bf16*> Activate(const StepRows& half, int layer, const BlockWeights& w,
                                       const Bf16* normed);

  const WeightLayout& layout_;
  const contract::RopeTable& rope_;
  Ops& ops_;
  ResidualStream residual_;
  std::shared_ptr<const std::byte> cosine_, sine_;  // the tables of rope_
  std::shared_ptr<Activations> activations_ = std::make_shared<Activations>();
  ForwardProbe* probe_ = nullptr;
  GrowingBuffer<Bf16> gate_up_;  // of a probed pass
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_TRANSFORMER_H_
