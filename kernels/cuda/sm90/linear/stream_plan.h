// How a block of stream.cuh divides its work and
// its shared memory. The host needs it to launch.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_PLAN_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_PLAN_H_

#include "kernels/contract/constants.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/schedule.h"

namespace isobit::cuda {

inline constexpr int kRowBytes = kBlockColumns * static_cast<int>(sizeof(Bf16));
inline constexpr int kStripRows = 16;  // of the packed weight; a warp multiplies one strip
inline constexpr int kCopyWarps = 4;
constexpr int StreamThreads(int warpgroups) { return 128 * warpgroups + 32 * kCopyWarps; }
inline constexpr int kUnitBytes = 512;  // of sums: 16 weight rows x 8 rows of x
inline constexpr int kKTileBlocks = 2;  // 64-column blocks in a K tile, which fills a stage
inline constexpr int kBlockSteps = kBlockColumns / contract::kMmaK;
inline constexpr int kKTileSteps = kKTileBlocks * kBlockSteps;

// How the blocks of a cluster exchange the sums of a pass. Of its units (16 weight rows x 8 rows of
// x), each of the blocks 0, 1, ... finishes units_each consecutive ones.
struct Exchange {
  int slots;       // sums that are added up for an output
  int units_each;  // per finishing block; a power of two, as clusters are
  ISOBIT_HD Exchange(int columns, contract::LeafSum sum, int cluster, int leaves)
      : slots(sum == contract::LeafSum::kTree ? cluster : 1 + (cluster - 1) * leaves),
        units_each(columns / 2 > cluster ? columns / 2 / cluster : 1) {}
  ISOBIT_HD int bytes() const { return slots * units_each * kUnitBytes; }
};

// The layout of a block's shared memory.
struct StreamPlan {
  int weight_bytes;  // of a stage
  int x_bytes;       // of a stage
  int x;             // offset of the ring of x; the ring of weights is at 0
  int received;      // offset of the sums of other blocks
  int barriers;      // offset: full and empty of each stage, then one for the received sums
  int total;
  ISOBIT_HD StreamPlan(const StreamSchedule& schedule, int columns, int received_bytes)
      : weight_bytes(kKTileBlocks * schedule.rows * kRowBytes),
        x_bytes(kKTileBlocks * columns * kRowBytes),
        x(schedule.stages * weight_bytes),
        received(x + schedule.stages * x_bytes),
        barriers(received + received_bytes),
        total(barriers + schedule.stages * 16 + 8) {
    // wgmma reads 64 rows of an operand even if the pass has fewer, so it reads beyond the ring at
    // the last operand.
    const int missing = (kTileRows - schedule.rows % kTileRows) % kTileRows;
    const int read = x + missing * kRowBytes;
    if (total < read) total = read;
  }
};

// The size of a block's shared memory in bytes.
inline int64_t StreamSharedBytes(const StreamSchedule& schedule, const LinearShape& shape) {
  const int cluster = shape.num_leaves / schedule.leaves;
  const int received =
      cluster > 1 ? Exchange(schedule.columns, shape.sum, cluster, schedule.leaves).bytes() : 0;
  return StreamPlan(schedule, schedule.columns, received).total;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_PLAN_H_
