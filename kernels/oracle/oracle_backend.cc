// Makes the oracle's table of ops. Each family of ops has a file of its own.
#include "kernels/oracle/oracle_backend.h"

#include "kernels/host_kernels.h"
#include "kernels/oracle/kernels.h"
#include "kernels/plain_weight_packer.h"

namespace isobit {
namespace oracle {

absl::Status Run(const PolicyLossArgs& a, Context& /*context*/) { return RunOnHost(a); }
absl::Status Run(const LossFunctionArgs& a, Context& /*context*/) { return RunOnHost(a); }
absl::Status Run(const TreeSumArgs& a, Context& /*context*/) { return RunOnHost(a); }
absl::Status Run(const SequenceSumsArgs& a, Context& /*context*/) { return RunOnHost(a); }

}  // namespace oracle

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
