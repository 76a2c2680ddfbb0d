// The baseline for AVX2 and FMA.
#define ISOBIT_FMA_PANEL FmaPanelAvx2
#define ISOBIT_FMA_LANES 8
#define ISOBIT_FMA_ROWS 3
#include "bench/kernels/fma_baseline.inc"
