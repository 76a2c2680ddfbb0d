// The definition of every op as plain scalar code over kernels/contract: slow and single-threaded.
// All tests use it as the oracle.
#ifndef ISOBIT_KERNELS_ORACLE_ORACLE_BACKEND_H_
#define ISOBIT_KERNELS_ORACLE_ORACLE_BACKEND_H_

#include <memory>

#include "common/config/numerics_mode.h"
#include "kernels/backend.h"
#include "kernels/oracle/kernels.h"

namespace isobit {

class OracleBackend final : public HostBackend {
 public:
  // mode: the contract, or a mode to contrast with it.
  explicit OracleBackend(NumericsMode mode = NumericsMode::kTree);
  const char* name() const override { return "oracle"; }
  const WeightPacker& packer() const override;

 private:
  oracle::Context context_;
};

std::unique_ptr<Backend> MakeOracleBackend(NumericsMode mode);
std::unique_ptr<Backend> MakeOracleBackend();  // kTree

}  // namespace isobit

#endif  // ISOBIT_KERNELS_ORACLE_ORACLE_BACKEND_H_
