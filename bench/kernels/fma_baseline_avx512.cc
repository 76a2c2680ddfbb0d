// The baseline for AVX-512.
#define ISOBIT_FMA_PANEL FmaPanelAvx512
#define ISOBIT_FMA_LANES 16
#define ISOBIT_FMA_ROWS 8
#include "bench/kernels/fma_baseline.inc"
