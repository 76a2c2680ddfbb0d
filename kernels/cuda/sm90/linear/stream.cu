// Launches the kernels of stream.cuh.
#include <algorithm>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/cuda/sm90/linear/stream.cuh"
#include "kernels/cuda/sm90/linear/stream.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

absl::Status LaunchLinearStream(const StreamSchedule& schedule, const LinearArgs& args,
                                const Stream& stream) {
  const LinearShape& shape = args.weight.shape;
  ISOBIT_ASSIGN_OR_RETURN(const CUtensorMap x_map, MapMatrix(args.x, args.m, shape.k, args.ldx,
                                                             schedule.columns, kBlockColumns));
  const int cluster = shape.num_leaves / schedule.leaves;
  const int64_t strips = CeilDiv(PackedRows(shape), kStripRows);
  const int64_t blocks = cluster > 1 ? CeilDiv(strips * kStripRows, schedule.rows) * cluster
                                     : std::min<int64_t>(schedule.blocks, strips);
  const StreamArgs kernel_args = {
      .packed = args.weight.packed,
      .leaves = BlocksOf(shape),
      .target = TargetOf(args),
      .schedule = schedule,
      .strips = static_cast<int32_t>(strips),
      .strips_each = (static_cast<uint64_t>(strips) << 32) / static_cast<uint64_t>(blocks) + 1,
      .cluster = cluster,
      .exchange = Exchange(schedule.columns, shape.sum, cluster, schedule.leaves)};
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(blocks),
                                    static_cast<unsigned>(CeilDiv(args.m, schedule.columns))),
                     .threads = dim3(StreamThreads(schedule.rows > kTileRows ? 2 : 1)),
                     .shared_bytes = static_cast<size_t>(StreamSharedBytes(schedule, shape)),
                     .cluster = cluster};
  switch (schedule.columns) {
    case 8:
      return LaunchStreamOf<8>(x_map, kernel_args, OutputOf(args), shape.sum, grid, stream);
    case 16:
      return LaunchStreamOf<16>(x_map, kernel_args, OutputOf(args), shape.sum, grid, stream);
    case 32:
      return LaunchStreamOf<32>(x_map, kernel_args, OutputOf(args), shape.sum, grid, stream);
    case 64:
      return LaunchStreamOf<64>(x_map, kernel_args, OutputOf(args), shape.sum, grid, stream);
    default:
      return absl::InvalidArgumentError("a streaming schedule has 8, 16, 32 or 64 columns");
  }
}

}  // namespace isobit::cuda
