// The variants of mma_panel, one translation unit each, and the function that they call elsewhere.
#ifndef ISOBIT_KERNELS_CPU_MMA_PANEL_VARIANTS_H_
#define ISOBIT_KERNELS_CPU_MMA_PANEL_VARIANTS_H_

#include "kernels/cpu/mma_panel.h"

namespace isobit::cpu {

void MmaPanelsPortable(const MmaArgs& args);
void MmaPanelsAvx2(const MmaArgs& args);
void MmaPanelsAvx512(const MmaArgs& args);

// contract::Mma16 over x[0..15] and w[0], w[k_stride], ...
float ScalarMmaStep(float c, const uint16_t* x, const uint16_t* w, int64_t k_stride);

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_MMA_PANEL_VARIANTS_H_
