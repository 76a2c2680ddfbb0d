// The row kernels for the compiler's baseline, and the choice of a table.
#define ISOBIT_ROW_KERNELS kRowKernelsPortable
#include "kernels/cpu/row_kernels.inc"

namespace isobit::cpu {

const RowKernels& GetRowKernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return kRowKernelsAvx512;
    case Isa::kAvx2:
      return kRowKernelsAvx2;
#endif
    default:
      return kRowKernelsPortable;
  }
}

}  // namespace isobit::cpu
