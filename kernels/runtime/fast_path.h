// The fast path of a rank on a GPU: the forward pass of steps whose bits are promised to nobody, in
// mode vanilla. It runs on the stream of the rank's other steps, on their KV cache, tables and
// activations. Not here: which steps take it, and what surrounds the pass (cuda_executor.cc).
#ifndef ISOBIT_KERNELS_RUNTIME_FAST_PATH_H_
#define ISOBIT_KERNELS_RUNTIME_FAST_PATH_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/all_reduce.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/model/transformer.h"
#include "kernels/model/weights.h"
#include "kernels/runtime/cuda_rank_group.h"
#include "kernels/runtime/rank_executor.h"
#include "kernels/runtime/step_graphs.h"

namespace isobit {

// cuBLAS reads weights row by row. So behind each block of the rank's weights lie its linear layers
// once more, in that order; all other parameters are those of the other steps.
class FastPath {
 public:
  // ops, layout: of the rank's other steps. All outlive the object. RESOURCE_EXHAUSTED: no memory.
  // INTERNAL: cuBLAS refused.
  static absl::StatusOr<std::unique_ptr<FastPath>> Create(const RankOptions& options,
                                                          const CudaRankGroup& group, CudaOps& ops,
                                                          const WeightLayout& layout);
  FastPath(const FastPath&) = delete;
  FastPath& operator=(const FastPath&) = delete;

  // Of the rank's weights, with the copies.
  const WeightLayout& layout() const { return layout_; }
  Transformer& transformer() { return transformer_; }
  StepGraphs& graphs() { return graphs_; }

  // Makes room for steps of `rows`, beside what `other`, of the other steps, has.
  // RESOURCE_EXHAUSTED: no memory.
  absl::Status Reserve(int64_t rows, const Transformer& other);

  // Makes the copies of `weights`, which have changed, and waits.
  absl::Status CopyWeights(WeightSource& weights);

 private:
  FastPath(const RankOptions& options, const WeightLayout& layout, std::unique_ptr<CudaOps> ops,
           std::unique_ptr<AllReduce> all_reduce);

  const WeightLayout& packed_layout_;
  const std::unique_ptr<CudaOps> ops_;
  const WeightLayout layout_;
  const std::unique_ptr<AllReduce> all_reduce_;  // null: one rank
  Transformer transformer_;
  StepGraphs graphs_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_FAST_PATH_H_
