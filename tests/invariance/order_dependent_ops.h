// The control for dimensions that only a wrong backend could break: shards, threads, instruction
// sets.
#ifndef ISOBIT_TESTS_INVARIANCE_ORDER_DEPENDENT_OPS_H_
#define ISOBIT_TESTS_INVARIANCE_ORDER_DEPENDENT_OPS_H_

#include "kernels/cpu/cpu_backend.h"
#include "tests/support/forwarding_backend.h"

namespace isobit::invariance {

// Leaves in another order, as a backend with a thread- or instruction-dependent split would add
// them.
class OrderDependentOps final : public testing_support::ForwardingBackend {
 public:
  OrderDependentOps() : ForwardingBackend(MakeCpuBackend({})) { Replace<LinearArgs>(*this); }
  absl::Status On(const LinearArgs& args) {
    LinearArgs other = args;
    using contract::LeafSum;
    other.weight.shape.sum =
        args.weight.shape.sum == LeafSum::kTree ? LeafSum::kChain : LeafSum::kTree;
    return inner().Run(other);
  }
};

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_ORDER_DEPENDENT_OPS_H_
