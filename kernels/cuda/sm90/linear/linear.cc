// Chooses a schedule and launches it.
#include "kernels/cuda/sm90/linear/linear.h"

#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/cuda/sm90/linear/general.h"
#include "kernels/cuda/sm90/linear/stream.h"
#include "kernels/cuda/sm90/linear/tile.h"
#include "kernels/ops/linear.h"

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

// y = round(combine(leaves of x W^T) + bias), see LinearArgs. All pointers are to GPU memory, and
// weight.packed has PackLinear's layout, at a multiple of 128 bytes. Needs no workspace. Fast if x
// and ldx are multiples of 16 bytes; otherwise a slower kernel is used. If m or n is 0, launches
// nothing. INTERNAL: CUDA refused the launch.
absl::Status Run(const LinearArgs& args, const Stream& stream) {
  if (IsEmpty(args)) return absl::OkStatus();
  const bool mappable = Mappable(args.x, args.ldx);
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  return Launch(ChooseLinear(*card, args.weight.shape, args.m, mappable, PushTime(args)), args,
                stream);
}

absl::Status LaunchLinearAs(const LinearSchedule& schedule, const LinearArgs& args,
                            const Stream& stream) {
  if (IsEmpty(args)) return absl::OkStatus();
  const bool mappable = Mappable(args.x, args.ldx);
  ISOBIT_RETURN_IF_ERROR(CheckSchedule(schedule, args.weight.shape, mappable));
  return Launch(schedule, args, stream);
}

}  // namespace isobit::cuda
