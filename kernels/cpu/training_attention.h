// The gradient of attention over whole sequences (C13).
//
// A worker takes one KV head of one sequence. It passes over tiles of keys, the last one first; for
// each tile over the KV head's query heads and their blocks of rows, in order. So the chains of dK
// and dV end with their tile, and those of dQ, of all rows, continue from tile to tile. Memory is
// linear in the sequence's length.
#ifndef ISOBIT_KERNELS_CPU_TRAINING_ATTENTION_H_
#define ISOBIT_KERNELS_CPU_TRAINING_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/attention.h"

namespace isobit::cpu {

// Sets the rows of x [rows, width] without a sequence to +0.
void ClearOutside(const PassSequences& sequences, int64_t rows, int64_t width, Bf16* x);

class AttentionGradientOp {
 public:
  AttentionGradientOp(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool);
  ~AttentionGradientOp();

  void Run(const AttentionGradientArgs& args);

 private:
  class Worker;

  ThreadPool& pool_;
  std::vector<Worker> workers_;
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_TRAINING_ATTENTION_H_
