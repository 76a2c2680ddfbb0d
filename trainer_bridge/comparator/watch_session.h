// One Watch call: a rolling summary at every interval, until the client or the server ends it.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_WATCH_SESSION_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_WATCH_SESSION_H_

#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/rpc/stream_writer.h"
#include "isobit/v1/comparator.pb.h"
#include "trainer_bridge/comparator/history.h"

namespace isobit {

class WatchSession final : public std::enable_shared_from_this<WatchSession> {
 public:
  // INVALID_ARGUMENT: a field is out of its range.
  static absl::Status Validate(const v1::WatchRequest& request);

  // `request` must be valid. The first summary is sent at once.
  static std::shared_ptr<WatchSession> Start(grpc::CallbackServerContext* context,
                                             const v1::WatchRequest& request,
                                             std::shared_ptr<History> history);

  grpc::ServerWriteReactor<v1::WatchResponse>* reactor() { return writer_.get(); }

  // Ends the stream. Thread-safe; later calls have no effect.
  void End(const absl::Status& status);

 private:
  WatchSession(const v1::WatchRequest& request, std::shared_ptr<History> history);

  void Tick();

  const std::chrono::milliseconds interval_;
  const size_t window_;
  const std::shared_ptr<History> history_;
  std::shared_ptr<StreamWriter<v1::WatchResponse>> writer_;  // set before the first tick

  std::mutex mutex_;
  bool over_ = false;                   // guarded by mutex_
  std::unique_ptr<grpc::Alarm> alarm_;  // guarded by mutex_
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_WATCH_SESSION_H_
