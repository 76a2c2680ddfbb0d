// The optimizer: norms of gradients, AdamW, and its moments in bf16.
#ifndef ISOBIT_KERNELS_OPS_OPTIMIZER_H_
#define ISOBIT_KERNELS_OPS_OPTIMIZER_H_

#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/portable.h"

namespace isobit {

struct SquareSumsArgs {
  const float* x = nullptr;  // [rows, columns]
  int64_t rows = 0;
  int64_t columns = 0;
  double* sums = nullptr;  // [rows]
};

// sum[0] = the balanced tree over x, which adds adjacent elements first.
struct TreeSum64Args {
  const double* x = nullptr;  // [count]
  int64_t count = 0;
  double* sum = nullptr;
};

struct AdamWArgs {
  int64_t count = 0;
  float* parameter = nullptr;  // [count], the master; like all that follow
  float* m = nullptr;
  float* v = nullptr;
  const float* gradient = nullptr;
  Bf16* working = nullptr;  // bf16(parameter), or null
  contract::AdamWStep step;
};

// A moment of AdamW in its bf16 form (C15).
struct DitherArgs {
  const float* x = nullptr;  // [count]
  int64_t count = 0;
  uint64_t step = 0;
  uint32_t moment = 0;  // 0: m, 1: v
  uint64_t first = 0;   // the index of x[0] in the whole parameter
  Bf16* out = nullptr;  // [count]
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_OPTIMIZER_H_
