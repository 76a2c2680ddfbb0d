// The CPU backend: every op with the bits of the contract, vectorised.
#ifndef ISOBIT_KERNELS_CPU_CPU_BACKEND_H_
#define ISOBIT_KERNELS_CPU_CPU_BACKEND_H_

#include <memory>

#include "common/config/numerics_mode.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa.h"

namespace isobit {

struct CpuOptions {
  cpu::Isa isa = cpu::DetectIsa();  // at most the highest level of this machine
  int num_threads = 1;              // of this rank, including the calling thread
  NumericsMode mode = NumericsMode::kTree;
};

// One rank's backend. Neither instruction set nor number of threads changes a bit. It serves one
// caller at a time and keeps its buffers; several may run at once and share packed weights. Ops of
// training have mode kTree alone; their memory beyond the arguments is linear in rows, in columns
// and in the largest weight.
std::unique_ptr<Backend> MakeCpuBackend(const CpuOptions& options);

// The packer of every CPU backend. All options use the same layout.
const WeightPacker& CpuWeightPacker();

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CPU_CPU_BACKEND_H_
