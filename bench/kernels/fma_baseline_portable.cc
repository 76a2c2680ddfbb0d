// The variant for any CPU, and the choice among the variants.
#define ISOBIT_FMA_PANEL FmaPanelPortable
#define ISOBIT_FMA_LANES 4
#define ISOBIT_FMA_ROWS 1
#include "bench/kernels/fma_baseline.h"
#include "bench/kernels/fma_baseline.inc"

namespace isobit {

FmaPanelFn GetFmaPanel(cpu::Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case cpu::Isa::kAvx512:
      return FmaPanelAvx512;
    case cpu::Isa::kAvx2:
      return FmaPanelAvx2;
#endif
    default:
      return FmaPanelPortable;
  }
}

}  // namespace isobit
