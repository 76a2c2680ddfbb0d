// The forward pass that both rollout and scorer run: a loop over a model's blocks on one
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
#include "kernels/blocks/block.h"
#include "kernels/blocks/residual_stream.h"
#include "kernels/contract/portable.h"
#include "kernels/contract/rope.h"
#include "kernels/model/forward_probe.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/probed_ops.h"
#include "kernels/model/weights.h"
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

  // From now on `probe` observes what Forward computes; the batch must then be one sequence. Null:
  // no probe. Call PrepareProbe, which allocates memory for a probed pass of `rows`, before;
  // DropProbe frees it. RESOURCE_EXHAUSTED: there is none.
  void SetProbe(ForwardProbe* probe) { probe_ = probe; }
  absl::Status PrepareProbe(int64_t rows);
  void DropProbe() { probed_ops_.reset(); }

  // This rank's columns of the logits: logits [rows, shape().vocab.size()] fp32, with leading
  // dimension ld. hidden: [rows, hidden_size].
  absl::Status Logits(const Bf16* hidden, int64_t rows, WeightSource& weights, float* logits,
                      int64_t ld);

 private:
  // Matrices that all blocks use in turn, one as large as the largest that a block needs there.
  using Activations = std::vector<GrowingBuffer<Bf16>>;

  absl::Status ShareRope();
  // The norm of block b, an index into plan().blocks or their number for the head.
  const Bf16* NormOf(size_t b, const std::byte* bytes) const;
  // Computes block b, whose weights are `bytes`. Each half first has its norm.
  absl::Status RunBlock(size_t b, const std::byte* bytes, const KvCache& cache);
  // For the probe: the residual and its norm for block b, after the sums of the block before.
  absl::Status SeeNorm(size_t b, const Bf16* normed);

  const WeightLayout& layout_;
  const std::vector<std::shared_ptr<const Block>>& blocks_;
  const contract::RopeTable& rope_;
  Backend& ops_;
  ResidualStream residual_;
  std::shared_ptr<const std::byte> cosine_, sine_;  // the tables of rope_
  std::shared_ptr<Activations> activations_ = std::make_shared<Activations>();
  ForwardProbe* probe_ = nullptr;
  std::unique_ptr<ProbedOps> probed_ops_;  // null: PrepareProbe was not called
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_TRANSFORMER_H_
