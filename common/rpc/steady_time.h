// Lets gRPC use times of the steady clock, for deadlines and alarms: a change of the wall clock
// must neither end a call nor prolong it.
//
//   context.set_deadline(std::chrono::steady_clock::now() + std::chrono::seconds(5));
#ifndef ISOBIT_COMMON_RPC_STEADY_TIME_H_
#define ISOBIT_COMMON_RPC_STEADY_TIME_H_

#include <grpc/support/time.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/time.h>

#include <chrono>

namespace isobit {

using SteadyTime = std::chrono::steady_clock::time_point;

// max() means never.
gpr_timespec ToGprTime(SteadyTime time);

// A call's deadline; max(): it has none.
SteadyTime DeadlineOf(const grpc::ServerContextBase& context);

}  // namespace isobit

// gRPC's extension point for other clocks: see grpcpp/support/time.h.
template <>
class grpc::TimePoint<isobit::SteadyTime> {
 public:
  TimePoint(const isobit::SteadyTime& time)  // NOLINT(google-explicit-constructor)
      : time_(isobit::ToGprTime(time)) {}
  gpr_timespec raw_time() const { return time_; }

 private:
  gpr_timespec time_;
};

#endif  // ISOBIT_COMMON_RPC_STEADY_TIME_H_
