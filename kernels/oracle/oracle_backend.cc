// Makes the oracle's table of ops. Each family of ops has a file of its own.
#include "kernels/oracle/oracle_backend.h"

#include "kernels/plain_weight_packer.h"

namespace isobit {

OracleBackend::OracleBackend(NumericsMode mode) : context_{.mode = mode} { Fill(context_); }

const WeightPacker& OracleBackend::packer() const {
  static const PlainWeightPacker packer;
  return packer;
}

std::unique_ptr<Backend> MakeOracleBackend(NumericsMode mode) {
  return std::make_unique<OracleBackend>(mode);
}

std::unique_ptr<Backend> MakeOracleBackend() { return MakeOracleBackend(NumericsMode::kTree); }

}  // namespace isobit
