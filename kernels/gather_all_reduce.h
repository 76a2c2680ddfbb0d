// The cross-rank sum among ranks that can read each other's partials in place, in host memory or in
// that of GPUs: after a meeting of their threads, each adds them in the order of the mode.
#ifndef ISOBIT_KERNELS_GATHER_ALL_REDUCE_H_
#define ISOBIT_KERNELS_GATHER_ALL_REDUCE_H_

#include "common/parallel/communicator.h"
#include "kernels/all_reduce.h"

namespace isobit {

class GatherAllReduce final : public AllReduce {
 public:
  // `ops` and `comm`, whose Gather must not copy, outlive the object.
  GatherAllReduce(NumericsMode mode, Ops& ops, Communicator& comm)
      : mode_(mode), ops_(ops), comm_(comm) {}

  absl::Status Norm(const void* partial, const RmsNormArgs& norm) override;

 private:
  const NumericsMode mode_;
  Ops& ops_;
  Communicator& comm_;
  Memory sum_;  // [rows, hidden] fp32, grows and never shrinks
  size_t sum_bytes_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_GATHER_ALL_REDUCE_H_
