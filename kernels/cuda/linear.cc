// See linear.h.
#include "kernels/cuda/linear.h"

#include "common/base/status_macros.h"
#include "kernels/cuda/linear_general.h"
#include "kernels/cuda/linear_stream.h"
#include "kernels/cuda/linear_tile.h"
#include "kernels/cuda/tensor_map.h"

namespace isobit::cuda {

absl::Status LaunchLinear(const LinearArgs& args, const Stream& stream) {
  return LaunchLinearAs(ChooseLinear(args.weight.shape, args.m, Mappable(args.x, args.ldx)), args,
                        stream);
}

absl::Status LaunchLinearAs(const LinearSchedule& schedule, const LinearArgs& args,
                            const Stream& stream) {
  if (args.m == 0 || args.weight.shape.n == 0) return absl::OkStatus();
  ISOBIT_RETURN_IF_ERROR(CheckSchedule(schedule, args.weight.shape, Mappable(args.x, args.ldx)));
  switch (schedule.kind) {
    case LinearSchedule::Kind::kGeneral:
      return LaunchLinearGeneral(args, stream);
    case LinearSchedule::Kind::kStream:
      return LaunchLinearStream(schedule.stream, args, stream);
    case LinearSchedule::Kind::kTile:
      return LaunchTileLinear(args, schedule.tile, stream);
  }
  return absl::InternalError("no such schedule");
}

}  // namespace isobit::cuda
