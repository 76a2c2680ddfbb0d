// RMSNorm of rows, with the residual sum before it, and its gradient.
#ifndef ISOBIT_KERNELS_OPS_RMS_NORM_H_
#define ISOBIT_KERNELS_OPS_RMS_NORM_H_

#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/ops/packs.h"

namespace isobit {

// residual = residual + bf16(sum + bias), if sum is set; then out = RMSNorm(residual) * weight.
struct RmsNormArgs {
  Bf16* residual = nullptr;     // [rows, hidden]; read, and also written if sum is set
  const float* sum = nullptr;   // [rows, hidden] fp32, the all-reduced row-parallel result, or null
  const float* bias = nullptr;  // [hidden] or null
  const Bf16* weight = nullptr;  // [hidden]
  Bf16* out = nullptr;           // [rows, hidden]
  int64_t rows = 0;
  int64_t hidden = 0;
  float eps = 0.0f;
};

struct RmsNormGradientArgs {
  const Bf16* x = nullptr;       // [rows, columns], the norm's input
  const Bf16* weight = nullptr;  // [columns]
  const Bf16* dy = nullptr;      // [rows, columns]
  int64_t columns = 0;
  float eps = 0.0f;
  PackBounds packs;
  Bf16* dx = nullptr;   // [rows, columns]
  float* dw = nullptr;  // [columns]
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_RMS_NORM_H_
