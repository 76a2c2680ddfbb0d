// The definition of every op as plain scalar code over kernels/contract: slow and single-threaded.
// All tests use it as the oracle.
#ifndef ISOBIT_KERNELS_ORACLE_ORACLE_OPS_H_
#define ISOBIT_KERNELS_ORACLE_ORACLE_OPS_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/config/numerics_mode.h"
#include "kernels/host_ops.h"

namespace isobit {

class OracleOps : public HostOps {
 public:
  const char* name() const override { return "oracle"; }
  const WeightPacker& packer() const override;
  absl::Status Embedding(const EmbeddingArgs& a) override;
  absl::Status RmsNorm(const RmsNormArgs& a) override;
  absl::Status SwiGlu(const SwiGluArgs& a) override;
  absl::Status Qkv(const QkvArgs& a) override;
  absl::Status Attention(const AttentionArgs& a) override;
  absl::Status Reduce(const ReduceArgs& a) final;
  absl::Status LogProbs(const LogProbArgs& a) override;

 protected:
  absl::Status Product(const LinearArgs& a) final;

 private:
  // One output element of Linear, before bias and rounding. m: the number of rows.
  virtual float Dot(const LinearShape& shape, int64_t m, const Bf16* x, const Bf16* w) const;
  // Element i of Reduce. values: [a.num_ranks].
  virtual float SumOf(const float* values, int64_t i, const ReduceArgs& a) const;
};

// mode: the contract, or a mode to contrast with it.
std::unique_ptr<Ops> MakeOracleOps(NumericsMode mode);
std::unique_ptr<Ops> MakeOracleOps();  // kTree

}  // namespace isobit

#endif  // ISOBIT_KERNELS_ORACLE_ORACLE_OPS_H_
