// The ops of the CPU backend, in the contract's order.
#ifndef ISOBIT_KERNELS_CPU_TREE_OPS_H_
#define ISOBIT_KERNELS_CPU_TREE_OPS_H_

#include <string>

#include "absl/status/status.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/log_probs.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/host_ops.h"

namespace isobit::cpu {

class TreeOps : public HostOps {
 public:
  explicit TreeOps(const CpuOptions& options);

  const char* name() const override { return name_.c_str(); }
  const WeightPacker& packer() const override { return CpuWeightPacker(); }

  absl::Status Embedding(const EmbeddingArgs& a) override;
  absl::Status RmsNorm(const RmsNormArgs& a) override;
  absl::Status SwiGlu(const SwiGluArgs& a) override;
  absl::Status Qkv(const QkvArgs& a) override;
  absl::Status Attention(const AttentionArgs& a) override;
  absl::Status Reduce(const ReduceArgs& a) final;
  absl::Status LogProbs(const LogProbArgs& a) override;

 protected:
  absl::Status Product(const LinearArgs& a) override;
  // Elements [begin, end) of Reduce.
  virtual void ReduceElements(const ReduceArgs& a, int64_t begin, int64_t end);

  LinearOp& linear() { return linear_; }
  const RowKernels& rows() const { return rows_; }

 private:
  const std::string name_;
  const RowKernels& rows_;
  ThreadPool pool_;
  LinearOp linear_;
  AttentionOp attention_;
  LogProbsOp log_probs_;
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_TREE_OPS_H_
