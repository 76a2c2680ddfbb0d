// The row functions of training and their gradients (C11, C12).
#ifndef ISOBIT_KERNELS_CPU_TRAINING_ROWS_H_
#define ISOBIT_KERNELS_CPU_TRAINING_ROWS_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/training_ops.h"

namespace isobit::cpu {

class TrainingRows {
 public:
  TrainingRows(const RowKernels& rows, ThreadPool& pool);

  void ColumnSums(const ColumnSumsArgs& a);
  void RmsNormGradient(const RmsNormGradientArgs& a);
  void SwiGluGradient(const SwiGluGradientArgs& a);
  void TrainingQkv(const TrainingQkvArgs& a);
  void QkvGradient(const QkvGradientArgs& a);
  void EmbeddingGradient(const EmbeddingGradientArgs& a);

 private:
  // Adds row `row` to the sums of its block.
  using AddRow = absl::FunctionRef<void(int64_t row, float* sums, int worker)>;

  // Calls add for all rows, those of a block of 64 in order, and combines each pack's blocks in
  // sums_ [packs][n].
  void SumRows(PackBounds packs, int64_t n, AddRow add);
  // out [n] = the sum over packs; pack p's sums are at sums + p * stride. Overwrites the sums.
  void JoinPacks(PackBounds packs, float* sums, int64_t stride, int64_t n, float* out) const;
  // out [d] = the norm weight's gradient, from the sums of `heads` heads, which are at columns
  // [first, ...) of sums_ [packs][n].
  void JoinHeads(PackBounds packs, int64_t n, int64_t first, int64_t heads, int64_t d, float* out);

  const RowKernels& rows_;
  ThreadPool& pool_;
  std::vector<float> sums_;
  std::vector<std::vector<float>> worker_sums_;
  std::vector<std::vector<Bf16>> worker_heads_;
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_TRAINING_ROWS_H_
