// The contrast modes of the CPU backend (contract/vanilla.h): their differences from TreeOps.
#ifndef ISOBIT_KERNELS_CPU_CONTRAST_OPS_H_
#define ISOBIT_KERNELS_CPU_CONTRAST_OPS_H_

#include "absl/status/status.h"
#include "kernels/cpu/tree_ops.h"

namespace isobit::cpu {

// Mode batch_invariant: a sum over ranks is passed from rank to rank, in bf16 between them.
class BatchInvariantOps : public TreeOps {
 public:
  using TreeOps::TreeOps;

 protected:
  void ReduceElements(const ReduceArgs& a, int64_t begin, int64_t end) final;
  // The rank at which the sum of element i starts.
  virtual int FirstRank(const ReduceArgs& /*a*/, int64_t /*i*/) const { return 0; }
  // The first element after i whose sum may start at another rank.
  virtual int64_t EndOfRun(const ReduceArgs& a, int64_t /*i*/) const { return a.end; }
};

// Mode vanilla: in addition, a sum starts at the same rank as in a ring, and the number of rows
// determines how K is split.
class VanillaOps final : public BatchInvariantOps {
 public:
  using BatchInvariantOps::BatchInvariantOps;

 protected:
  absl::Status Product(const LinearArgs& a) override;
  int FirstRank(const ReduceArgs& a, int64_t i) const override;
  int64_t EndOfRun(const ReduceArgs& a, int64_t i) const override;
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_CONTRAST_OPS_H_
