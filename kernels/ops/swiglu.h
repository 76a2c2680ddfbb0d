// SwiGLU of rows of gates and ups, and its gradient.
#ifndef ISOBIT_KERNELS_OPS_SWIGLU_H_
#define ISOBIT_KERNELS_OPS_SWIGLU_H_

#include <cstdint>

#include "kernels/contract/portable.h"

namespace isobit {

struct SwiGluArgs {
  const Bf16* gate_up = nullptr;  // [rows, 2 * columns]: gates, then ups
  Bf16* out = nullptr;            // [rows, columns]
  int64_t rows = 0;
  int64_t columns = 0;
};

struct SwiGluGradientArgs {
  const Bf16* gate_up = nullptr;  // [rows, 2 * columns]: gates, then ups
  const Bf16* ds = nullptr;       // [rows, columns]
  int64_t rows = 0;
  int64_t columns = 0;
  Bf16* dgate_up = nullptr;  // [rows, 2 * columns]
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_SWIGLU_H_
