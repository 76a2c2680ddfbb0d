// The forward pass that both rollout and scorer run: a decoder-only transformer on one
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
#include "kernels/backend.h"
#include "kernels/contract/portable.h"
#include "kernels/contract/rope.h"
#include "kernels/model/forward_probe.h"
#include "kernels/model/kv_cache.h"
#include "kernels/blocks/residual_stream.h"
#include "kernels/model/weights.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/step_tables.h"

namespace isobit {

// Token rows of one step. Sequences cover the rows in order. Several sequences may share pages: a
// layer writes the keys and values of all rows before attention reads any, and a sequence that
// reads what this step writes comes after the sequence that writes it.
struct Batch {
  std::vector<int32_t> ids;  // [rows], each in [0, vocab_size)
  std::vector<SequenceRows> sequences;
  bool writes_past = false;  // as in StepTables::Upload
};

// Not thread-safe: each rank has one object and one thread. All ranks make the same calls with the
// same batch.
class Transformer {
 public:
  // All arguments outlive the object. `rope` covers every position of any batch. `all_reduce`: null
  // with one rank.
  Transformer(const WeightLayout& layout, const contract::RopeTable& rope, Backend& ops,
              AllReduce* all_reduce);

  // From now on uses the activation memory of `other`, which has the same model and device. The
  // passes of the two must not overlap in time.
  void ShareMemory(const Transformer& other);

  // Allocates memory for batches of `rows`, so that they allocate nothing: captured graphs need
  // that. RESOURCE_EXHAUSTED: there is no memory.
  absl::Status Reserve(int64_t rows);
  // Upper bound of what Reserve(rows) allocates, without the rotary table and two bias copies.
  static size_t ReservedBytes(const WeightLayout& layout, int64_t rows);

  // Runs all layers and the final norm. hidden: [rows, hidden_size] bf16, the same on every rank.
  // The batch must not change until the ops have ended.
  absl::Status Forward(const Batch& batch, WeightSource& weights, const KvCache& cache,
                       Bf16* hidden);

  // The same for an uploaded step of `rows` rows, including padding.
  absl::Status Forward(const UploadedStep& step, int64_t rows, WeightSource& weights,
                       const KvCache& cache, Bf16* hidden);

  // From now on `probe` observes what Forward computes; the batch must then
  // be one sequence. Null: no probe. A pass without a probe costs one check
  // of the pointer per op. PrepareProbe allocates memory for a probed pass
  // of `rows`; DropProbe frees it. RESOURCE_EXHAUSTED: there is none.
  void SetProbe(ForwardProbe* probe) { probe_ = probe; }
  absl::Status PrepareProbe(int64_t rows);
  void DropProbe() { gate_up_ = {}; }

  // This rank's columns of the logits: logits [rows, shape().vocab.size()] fp32, with leading
  // dimension ld. hidden: [rows, hidden_size].
  absl::Status Logits(const Bf16* hidden, int64_t rows, WeightSource& weights, float* logits,
                      int64_t ld);

 private:
  struct Activations {  // of the current batch
    GrowingBuffer<Bf16> qkv, attended, activated;
  };

  absl::Status ShareRope();
  // For the probe: the residual and its norm, after the sums of the op before.
  absl::Status SeeNorm(const ProbeSite& sum, const ProbeSite& norm, const Bf16* normed);
  // next_norm: if the step is in halves, the weight of the norm after this layer; otherwise null.
  absl::Status Layer(int layer, const BlockWeights& w, const Bf16* next_norm, const KvCache& cache);
  // The pieces of a layer, for the rows of `half`. normed: [half.rows, hidden_size]. Qkv sets
  // activations_->qkv to queries, keys and values, and writes keys and values into the cache.
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
  Backend& ops_;
  ResidualStream residual_;
  std::shared_ptr<const std::byte> cosine_, sine_;  // the tables of rope_
  std::shared_ptr<Activations> activations_ = std::make_shared<Activations>();
  ForwardProbe* probe_ = nullptr;
  GrowingBuffer<Bf16> gate_up_;  // of a probed pass
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_TRANSFORMER_H_
