// Logprobs and sampling of rows of logits, without sorting a row: block maxima and integer weights
// find what the oracle finds by ranking all tokens.
#ifndef ISOBIT_KERNELS_CPU_LOG_PROBS_H_
#define ISOBIT_KERNELS_CPU_LOG_PROBS_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops.h"

namespace isobit::cpu {

class LogProbsOp {
 public:
  LogProbsOp(const RowKernels& rows, ThreadPool& pool);
  ~LogProbsOp();

  void Run(const LogProbArgs& args);

 private:
  class Worker;

  const RowKernels& rows_;
  ThreadPool& pool_;
  std::vector<Worker> workers_;
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_LOG_PROBS_H_
