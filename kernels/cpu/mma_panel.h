// Chains of k16 steps (contract C1, C2) for panels of 32 columns by any number of rows: the inner
// kernel of linear layers (x * w^T) and of attention (q * k^T and p * v).
//
// Every variant gives the bits of contract::Mma16 for every input, in three tiers:
//   fast    exponents of the operands lie in a window where 32-bit arithmetic is exact: all data
//           that a healthy model has;
//   wide    any finite operands, in double precision, several times slower;
//   scalar  contract::Mma16 itself, for what the contract alone decides: infinities, NaN, and steps
//           whose result is infinite or below 2^-126.
// A tier is chosen for each block of rows x 256 k x 32 columns; the choice cannot change a bit.
// The caller's thread rounds to nearest and keeps subnormals, as every thread does by default.
#ifndef ISOBIT_KERNELS_CPU_MMA_PANEL_H_
#define ISOBIT_KERNELS_CPU_MMA_PANEL_H_

#include <cstdint>

#include "kernels/cpu/isa.h"

namespace isobit::cpu {

inline constexpr int64_t kPanelColumns = 32;

// The range of exponents of some bf16 values, as exponent fields (bias 127; zeros and subnormals
// count as 1). A range wider than the true one is correct, but slower.
struct ExponentRange {
  uint16_t min_nonzero = 255;  // over non-zero values; 255 if there are none
  uint16_t max = 1;            // over all values; 255 if there is an infinity or a NaN
};

// A matrix of bf16 columns in panels: element k of column 32 * p + j is data[p * panel_stride + k *
// k_stride + j]. Strides are in elements. A packed matrix has k_stride = 32; a value cache
// [position][head_dim] is a view with panel_stride = 32.
struct PanelView {
  const uint16_t* data;
  int64_t panel_stride;
  int64_t k_stride;
  const ExponentRange* ranges;  // [panels]; each covers all k elements of its panel
};

// Packs rows 0..rows-1 (<= 32) of w, each of k bf16 values and row_stride apart, into one panel
// out[padded k][32]; padded k is k rounded up to a multiple of 16. Fills the rest with +0.
ExponentRange PackPanel(const uint16_t* w, int64_t row_stride, int64_t rows, int64_t k,
                        uint16_t* out);

// The range of one panel's elements 0..k-1, for panels that PackPanel has not made.
ExponentRange ScanPanel(const uint16_t* panel, int64_t k_stride, int64_t k);

// The number of steps (16 k by 32 columns by one row) computed in each tier.
struct TierCounts {
  int64_t fast = 0;
  int64_t wide = 0;
  int64_t scalar = 0;  // counted per column: 16 k by one column by one row
};

// c[r * ldc + n] = chain of k16 steps from c[r * ldc + n] over x[r * ldx + 0..k) and column n of w,
// for r < rows and n < 32 * panels.
struct MmaArgs {
  PanelView w;
  int64_t panels;
  const uint16_t* x;  // bf16
  int64_t ldx;
  int64_t rows;
  int64_t k;  // a multiple of 16
  float* c;
  int64_t ldc;
  TierCounts* tiers = nullptr;  // if not null, the counts are added to it
};

using MmaPanelsFn = void (*)(const MmaArgs&);

// The variant for an instruction set, which must not exceed DetectIsa().
MmaPanelsFn GetMmaPanels(Isa isa);

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_MMA_PANEL_H_
