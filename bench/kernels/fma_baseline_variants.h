// The functions that the fma_baseline_<isa>.cc files define. See FmaPanelFn.
#ifndef ISOBIT_BENCH_KERNELS_FMA_BASELINE_VARIANTS_H_
#define ISOBIT_BENCH_KERNELS_FMA_BASELINE_VARIANTS_H_

#include <cstdint>

namespace isobit {

void FmaPanelPortable(const float* x, int64_t ldx, int64_t m, const uint16_t* w, int64_t k,
                      float* y, int64_t ldy);
void FmaPanelAvx2(const float* x, int64_t ldx, int64_t m, const uint16_t* w, int64_t k, float* y,
                  int64_t ldy);
void FmaPanelAvx512(const float* x, int64_t ldx, int64_t m, const uint16_t* w, int64_t k, float* y,
                    int64_t ldy);

}  // namespace isobit

#endif  // ISOBIT_BENCH_KERNELS_FMA_BASELINE_VARIANTS_H_
