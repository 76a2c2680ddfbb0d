// A rank's second forward pass on a GPU, for steps whose bits are not promised. It uses the stream,
// KV cache, tables and activations of the rank's other steps. Not here: which steps use it, and
// what surrounds the pass (cuda_executor.cc).
#ifndef ISOBIT_KERNELS_RUNTIME_VARIANT_PASS_H_
#define ISOBIT_KERNELS_RUNTIME_VARIANT_PASS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/all_reduce.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/model/transformer.h"
#include "kernels/model/weights.h"
#include "kernels/runtime/cuda_rank_group.h"
#include "kernels/runtime/rank_executor.h"
#include "kernels/runtime/step_graphs.h"

namespace isobit {

// cuBLAS reads weights row by row. So each block of the rank's weights ends with a second copy of
// its linear layers, in row order; all other parameters are shared with the other steps.
class VariantPass {
 public:
  // ops, layout: those of the rank's other steps. All arguments outlive the object.
  // RESOURCE_EXHAUSTED: there is no memory. INTERNAL: cuBLAS failed.
  static absl::StatusOr<std::unique_ptr<VariantPass>> Create(const RankOptions& options,
                                                             const CudaRankGroup& group,
                                                             CudaBackend& ops,
                                                             const WeightLayout& layout);
  VariantPass(const VariantPass&) = delete;
  VariantPass& operator=(const VariantPass&) = delete;

  // The layout of the rank's weights with the copies.
  const WeightLayout& layout() const { return layout_; }
  Transformer& transformer() { return transformer_; }
  StepGraphs& graphs() { return graphs_; }

  // Allocates memory for steps of `rows`, in addition to that of `other`, which runs the other
  // steps. RESOURCE_EXHAUSTED: there is no memory.
  absl::Status Reserve(int64_t rows, const Transformer& other);

  // Makes the copies for `weights`, which have changed, and waits for them.
  absl::Status CopyWeights(WeightSource& weights);

 private:
  VariantPass(const RankOptions& options, const WeightLayout& layout,
              std::unique_ptr<CudaBackend> ops, std::unique_ptr<AllReduce> all_reduce);

  const WeightLayout& packed_layout_;
  const std::unique_ptr<CudaBackend> ops_;
  const WeightLayout layout_;
  const std::unique_ptr<AllReduce> all_reduce_;  // null with one rank
  Transformer transformer_;
  StepGraphs graphs_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_VARIANT_PASS_H_
