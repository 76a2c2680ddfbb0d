// The row kernels compiled for AVX-512.
#define ISOBIT_ROW_KERNELS kRowKernelsAvx512
#include "kernels/cpu/row_kernels.inc"
