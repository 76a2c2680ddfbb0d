// The tables that the row_kernels_<isa>.cc files define.
#ifndef ISOBIT_KERNELS_CPU_ROW_KERNELS_VARIANTS_H_
#define ISOBIT_KERNELS_CPU_ROW_KERNELS_VARIANTS_H_

#include "kernels/cpu/row_kernels.h"

namespace isobit::cpu {

extern const RowKernels kRowKernelsPortable;
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_ROW_KERNELS_VARIANTS_H_
