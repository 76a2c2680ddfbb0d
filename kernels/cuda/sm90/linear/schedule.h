// Which kernel computes a linear layer, and with which parameters. Every schedule gives the same
// bits (docs/NUMERICS.md C1 to C3); they differ only in speed.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_SCHEDULE_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_SCHEDULE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/sm90/linear/tile.h"
#include "kernels/ops/linear_shape.h"

namespace isobit::cuda {

// The streaming schedule, for few rows of x: the weights pass through shared memory once, as
// wgmma's 64-row operand, and x is the narrow operand (stream.cuh).
struct StreamSchedule {
  int columns = 0;  // rows of x in one product: 8, 16, 32 or 64; more rows take several grids
  int rows = 64;    // packed weight rows per pass: a multiple of 16, up to 64 (HasWideStream: 128)
  int leaves = 0;   // per block; num_leaves / leaves blocks (1, 2, 4, 8) form a cluster
  int stages = 0;   // of the ring buffer, each for one K tile of 128 columns
  int blocks = 0;   // if a block has all leaves: the most blocks that share the weight's rows
};

// Whether a block with all leaves may make passes of up to 128 rows, shared by two warpgroups: x
// must be wide enough for that to pay off, and the pending sums must leave enough registers.
constexpr bool HasWideStream(int columns, contract::LeafSum sum) {
  return columns >= 16 && sum == contract::LeafSum::kChain;
}

struct LinearSchedule {
  enum class Kind { kGeneral, kStream, kTile };
  Kind kind = Kind::kGeneral;  // kGeneral: any shape and alignment (general.h)
  StreamSchedule stream = {};
  TileSchedule tile = {};  // for many rows
};

// The schedule of a layer: a pure function of the card, the shape and the rows of x. `mappable`: x
// can have a tensor map (sm90/device/tensor_map.h). push_us: the microseconds that pushed sums take
// to arrive at other ranks; 0: the layer does not push.
LinearSchedule ChooseLinear(const Card& card, const LinearShape& shape, int64_t m, bool mappable,
                            double push_us = 0);

// Whether a schedule can compute a layer. INVALID_ARGUMENT: it cannot; the message says why.
absl::Status CheckSchedule(const LinearSchedule& schedule, const LinearShape& shape, bool mappable);

// Whether the width of every leaf but the last is a multiple of 16 columns, so that no k16 step has
// columns of two leaves.
bool WholeSteps(const LinearShape& shape);

// e.g. "stream 16x64 l4 s6"
std::string Describe(const LinearSchedule& schedule);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_SCHEDULE_H_
