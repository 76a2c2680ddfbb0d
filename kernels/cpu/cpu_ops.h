// The CPU backend: every op of kernels/ops.h, with the bits of the contract, vectorised.
#ifndef ISOBIT_KERNELS_CPU_CPU_OPS_H_
#define ISOBIT_KERNELS_CPU_CPU_OPS_H_

#include <memory>

#include "common/config/numerics_mode.h"
#include "kernels/cpu/isa.h"
#include "kernels/ops.h"

namespace isobit {

struct CpuOptions {
  cpu::Isa isa = cpu::DetectIsa();  // at most the highest level of this machine
  int num_threads = 1;              // of this rank, including the calling thread
  NumericsMode mode = NumericsMode::kTree;
};

// One rank's backend. Neither instruction set nor number of threads changes a bit. An Ops object
// serves one caller at a time; several objects may run at once and share packed weights.
std::unique_ptr<Ops> MakeCpuOps(const CpuOptions& options);

// The packer of every CPU backend. All options use the same layout.
const WeightPacker& CpuWeightPacker();

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CPU_CPU_OPS_H_
