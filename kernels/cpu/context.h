// What the CPU's ops share: kernels of one instruction set, threads and buffers; and one function
// an op, which the files of this folder define.
#ifndef ISOBIT_KERNELS_CPU_CONTEXT_H_
#define ISOBIT_KERNELS_CPU_CONTEXT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/config/numerics_mode.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/log_probs.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/training_attention.h"
#include "kernels/cpu/training_products.h"
#include "kernels/ops/all.h"

namespace isobit::cpu {

// The fewest rows, or elements of a vector, for which a thread is woken.
inline constexpr int64_t kRowGrain = 4;
inline constexpr int64_t kElementGrain = 16384;

struct Context {
  explicit Context(const CpuOptions& options);

  const NumericsMode mode;
  const RowKernels& rows;
  ThreadPool pool;
  LinearOp linear;
  AttentionOp attention;
  LogProbsOp log_probs;
  TrainingProducts products;
  AttentionGradientOp attention_gradient;
  std::vector<Bf16> gate_up;  // [m, n] of a gated Linear
};

#define ISOBIT_OP(Name) absl::Status Run(const Name##Args& a, Context& context);
ISOBIT_OPS(ISOBIT_OP)
#undef ISOBIT_OP

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_CONTEXT_H_
