// How the rows of a training pass are cut into packs, over which gradients are summed.
#ifndef ISOBIT_KERNELS_OPS_PACKS_H_
#define ISOBIT_KERNELS_OPS_PACKS_H_

#include <cstdint>

#include "absl/types/span.h"

namespace isobit {

// The packs of a pass over token rows: pack i is rows [bounds[i], bounds[i + 1]). bounds[0] is 0,
// and the last bound is the number of rows. The number of packs is a power of two, at most 64; a
// pack may be empty. Sums of packs are combined in a balanced tree. Host memory.
using PackBounds = absl::Span<const int64_t>;

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_PACKS_H_
