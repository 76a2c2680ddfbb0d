// The definition of every op as plain scalar code over kernels/contract: slow, single-threaded, the
// oracle of all tests.
#ifndef ISOBIT_KERNELS_ORACLE_ORACLE_OPS_H_
#define ISOBIT_KERNELS_ORACLE_ORACLE_OPS_H_

#include <memory>

#include "kernels/ops.h"

namespace isobit {

std::unique_ptr<Ops> MakeOracleOps();

}  // namespace isobit

#endif  // ISOBIT_KERNELS_ORACLE_ORACLE_OPS_H_
