// Chooses a schedule and launches it.
#include "kernels/cuda/linear/linear.h"

#include "common/base/status_macros.h"
#include "kernels/cuda/device/tensor_map.h"
#include "kernels/cuda/linear/general.h"
#include "kernels/cuda/linear/stream.h"
#include "kernels/cuda/linear/tile.h"

namespace isobit::cuda {
namespace {

absl::Status Launch(const LinearSchedule& schedule, const LinearArgs& args, const Stream& stream) {
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

bool IsEmpty(const LinearArgs& args) { return args.m == 0 || args.weight.shape.n == 0; }

}  // namespace

absl::Status LaunchLinear(const LinearArgs& args, const Stream& stream) {
  if (IsEmpty(args)) return absl::OkStatus();
  const bool mappable = Mappable(args.x, args.ldx);
  return Launch(ChooseLinear(kH200, args.weight.shape, args.m, mappable, PushTime(args)), args,
                stream);
}

absl::Status LaunchLinearAs(const LinearSchedule& schedule, const LinearArgs& args,
                            const Stream& stream) {
  if (IsEmpty(args)) return absl::OkStatus();
  const bool mappable = Mappable(args.x, args.ldx);
  ISOBIT_RETURN_IF_ERROR(CheckSchedule(kH200, schedule, args.weight.shape, mappable));
  return Launch(schedule, args, stream);
}

}  // namespace isobit::cuda
