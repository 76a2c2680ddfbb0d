// The CPU backend of training: every op of kernels/training_ops.h, with the bits of the contract,
// vectorised.
#ifndef ISOBIT_KERNELS_CPU_TRAINING_OPS_H_
#define ISOBIT_KERNELS_CPU_TRAINING_OPS_H_

#include <memory>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/training_ops.h"

namespace isobit {

// Neither instruction set nor number of threads changes a bit. options.mode must be kTree. The
// object serves one caller at a time and keeps its buffers; its memory beyond the arguments is
// linear in rows, in columns and in the largest weight.
std::unique_ptr<TrainingOps> MakeCpuTrainingOps(const CpuOptions& options);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CPU_TRAINING_OPS_H_
