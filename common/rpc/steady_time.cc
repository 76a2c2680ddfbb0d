// gRPC's monotonic clock need not count from where C++'s does, so that times are converted by what
// is left until then.
#include "common/rpc/steady_time.h"

namespace isobit {
namespace {

using std::chrono::nanoseconds;

}  // namespace

gpr_timespec ToGprTime(SteadyTime time) {
  if (time == SteadyTime::max()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const nanoseconds left = time - std::chrono::steady_clock::now();
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(left.count(), GPR_TIMESPAN));
}

SteadyTime DeadlineOf(const grpc::ServerContextBase& context) {
  // The server has it by the monotonic clock; only a conversion would ask for the wall clock.
  const gpr_timespec deadline = gpr_convert_clock_type(context.raw_deadline(), GPR_CLOCK_MONOTONIC);
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(GPR_CLOCK_MONOTONIC));
  // Beyond some years it is none.
  constexpr int64_t kLongestS = int64_t{10} * 365 * 24 * 3600;
  if (gpr_time_cmp(deadline, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0 || left.tv_sec > kLongestS) {
    return SteadyTime::max();
  }
  return std::chrono::steady_clock::now() + std::chrono::seconds(left.tv_sec) +
         nanoseconds(left.tv_nsec);
}

}  // namespace isobit
