// Logprobs and sampling from rows of logits, without sorting a row. Block maxima and integer
// weights give the same results as the oracle, which ranks all tokens.
#ifndef ISOBIT_KERNELS_CPU_LOG_PROBS_H_
#define ISOBIT_KERNELS_CPU_LOG_PROBS_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/log_probs.h"

namespace isobit::cpu {

class LogProbsOp {
 public:
  LogProbsOp(const RowKernels& rows, ThreadPool& pool);
  ~LogProbsOp();

  void Run(const LogProbsArgs& args);
  void Run(const TrainingLogProbsArgs& args);
  void Run(const LogProbGradientArgs& args);

 private:
  class Worker;
  using RunRow = absl::FunctionRef<void(int64_t row, Worker& worker)>;
  void ForEachRow(int64_t rows, RunRow run);

  const RowKernels& rows_;
  ThreadPool& pool_;
  std::vector<Worker> workers_;
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_LOG_PROBS_H_
