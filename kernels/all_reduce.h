// The cross-rank sum that ends a row-parallel layer, with the norm that always follows it: what a
// backend may fuse. Not here: how the ranks' bytes travel.
#ifndef ISOBIT_KERNELS_ALL_REDUCE_H_
#define ISOBIT_KERNELS_ALL_REDUCE_H_

#include "absl/status/status.h"
#include "kernels/ops.h"

namespace isobit {

// One rank's end of the sum. Every rank makes the same calls in the same order, with the same
// shapes.
class AllReduce {
 public:
  virtual ~AllReduce() = default;

  // Whether partial sums come as bf16 instead of fp32 (vanilla over NCCL, as other engines do it).
  virtual bool takes_bf16() const { return false; }

  // norm.residual += bf16(the sum of all ranks' partials + norm.bias), then norm.out =
  // RMSNorm(norm.residual) * norm.weight; norm.sum is unset. partial: [norm.rows, norm.hidden] of
  // this rank, fp32 or bf16 as takes_bf16 says; it must stay as it is until the next call's ops
  // have ended, so a caller alternates between two buffers.
  virtual absl::Status Norm(const void* partial, const RmsNormArgs& norm) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_ALL_REDUCE_H_
