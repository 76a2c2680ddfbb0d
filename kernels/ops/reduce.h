// The sum of the ranks' partial results.
#ifndef ISOBIT_KERNELS_OPS_REDUCE_H_
#define ISOBIT_KERNELS_OPS_REDUCE_H_

#include <cstdint>

namespace isobit {

// out[i] = the sum of W ranks' partials in tree order (C4).
struct ReduceArgs {
  const float* const* partials = nullptr;  // [W] pointers to [count] fp32
  int num_ranks = 0;
  int64_t begin = 0;  // elements [begin, end) are written
  int64_t end = 0;
  int64_t count = 0;  // of the whole message; a ring's order depends on it (contrast modes)
  float* out = nullptr;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_REDUCE_H_
