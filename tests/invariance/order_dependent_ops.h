// The control for dimensions that only a wrong backend could break: shards, threads, instruction
// sets.
#ifndef ISOBIT_TESTS_INVARIANCE_ORDER_DEPENDENT_OPS_H_
#define ISOBIT_TESTS_INVARIANCE_ORDER_DEPENDENT_OPS_H_

#include "kernels/cpu/cpu_ops.h"
#include "tests/support/forwarding_ops.h"

namespace isobit::invariance {

// Leaves in another order, as a backend with a thread- or instruction-dependent split would add
// them.
class OrderDependentOps final : public testing_support::ForwardingOps {
 public:
  OrderDependentOps() : ForwardingOps(MakeCpuOps({})) {}
  absl::Status Linear(const LinearArgs& args) override {
    LinearArgs other = args;
    using contract::LeafSum;
    other.weight.shape.sum =
        args.weight.shape.sum == LeafSum::kTree ? LeafSum::kChain : LeafSum::kTree;
    return ForwardingOps::Linear(other);
  }
};

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_ORDER_DEPENDENT_OPS_H_
