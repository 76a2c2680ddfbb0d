// The row-wise forward ops: embedding, RMSNorm, SwiGLU.
#ifndef ISOBIT_KERNELS_CPU_ROW_OPS_H_
#define ISOBIT_KERNELS_CPU_ROW_OPS_H_

#include <cstdint>

#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops.h"

namespace isobit::cpu {

inline constexpr int64_t kRowGrain = 4;  // the fewest rows for which a thread is woken

void Embedding(const EmbeddingArgs& a);
void RmsNorm(const RmsNormArgs& a, const RowKernels& rows, ThreadPool& pool);
void SwiGlu(const SwiGluArgs& a, const RowKernels& rows, ThreadPool& pool);

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_ROW_OPS_H_
