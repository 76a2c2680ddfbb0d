// One function an op: its scalar definition. The files of this folder define them.
#ifndef ISOBIT_KERNELS_ORACLE_KERNELS_H_
#define ISOBIT_KERNELS_ORACLE_KERNELS_H_

#include <vector>

#include "absl/status/status.h"
#include "common/config/numerics_mode.h"
#include "kernels/ops/all.h"

namespace isobit::oracle {

struct Context {
  NumericsMode mode = NumericsMode::kTree;
  std::vector<Bf16> gate_up = {};  // [m, n] of a gated Linear
};

#define ISOBIT_OP(Name) absl::Status Run(const Name##Args& a, Context& context);
ISOBIT_OPS(ISOBIT_OP)
#undef ISOBIT_OP

}  // namespace isobit::oracle

#endif  // ISOBIT_KERNELS_ORACLE_KERNELS_H_
