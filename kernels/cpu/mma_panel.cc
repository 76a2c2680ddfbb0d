// Packing of panels, the scalar tier, and the choice of a variant.
#include "kernels/cpu/mma_panel.h"

#include <algorithm>

#include "kernels/contract/mma16.h"
#include "kernels/cpu/mma_panel_variants.h"

namespace isobit::cpu {

float ScalarMmaStep(float c, const uint16_t* x, const uint16_t* w, int64_t k_stride) {
  uint16_t column[contract::kMmaK];
  for (int k = 0; k < contract::kMmaK; ++k) column[k] = w[k * k_stride];
  return contract::Mma16(c, x, column);
}

ExponentRange ScanPanel(const uint16_t* panel, int64_t k_stride, int64_t k) {
  ExponentRange range;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      const uint16_t magnitude = panel[i * k_stride + j] & 0x7fff;
      const uint16_t field = std::max<uint16_t>(magnitude >> 7, 1);
      range.max = std::max(range.max, field);
      if (magnitude != 0) range.min_nonzero = std::min(range.min_nonzero, field);
    }
  }
  return range;
}

ExponentRange PackPanel(const uint16_t* w, int64_t row_stride, int64_t rows, int64_t k,
                        uint16_t* out) {
  const int64_t padded_k = (k + contract::kMmaK - 1) / contract::kMmaK * contract::kMmaK;
  std::fill(out, out + padded_k * kPanelColumns, uint16_t{0});
  for (int64_t j = 0; j < rows; ++j) {
    for (int64_t i = 0; i < k; ++i) out[i * kPanelColumns + j] = w[j * row_stride + i];
  }
  return ScanPanel(out, kPanelColumns, padded_k);
}

MmaPanelsFn GetMmaPanels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return MmaPanelsAvx512;
    case Isa::kAvx2:
      return MmaPanelsAvx2;
#endif
    default:
      return MmaPanelsPortable;
  }
}

}  // namespace isobit::cpu
