// The row kernels compiled for AVX2 and FMA.
#define ISOBIT_ROW_KERNELS kRowKernelsAvx2
#include "kernels/cpu/row_kernels.inc"
