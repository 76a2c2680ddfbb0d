// Drives one Watch call.
#include "trainer_bridge/comparator/watch_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/rpc/steady_time.h"

namespace isobit {
namespace {

constexpr uint32_t kDefaultIntervalMs = 1000;
constexpr uint32_t kDefaultWindow = 256;

uint32_t IntervalMs(const v1::WatchRequest& request) {
  return request.has_interval_ms() ? request.interval_ms() : kDefaultIntervalMs;
}

uint32_t Window(const v1::WatchRequest& request) {
  return request.has_window_sequences() ? request.window_sequences() : kDefaultWindow;
}

absl::Status CheckRange(const char* field, uint32_t value, uint32_t low, uint32_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", value, ", expected ", low, " to ", high));
}

}  // namespace

absl::Status WatchSession::Validate(const v1::WatchRequest& request) {
  ISOBIT_RETURN_IF_ERROR(CheckRange("interval_ms", IntervalMs(request), 10, 3600000));
  return CheckRange("window_sequences", Window(request), 1, History::kMaxWindow);
}

std::shared_ptr<WatchSession> WatchSession::Start(grpc::CallbackServerContext* context,
                                                  const v1::WatchRequest& request,
                                                  std::shared_ptr<History> history) {
  const std::shared_ptr<WatchSession> session(new WatchSession(request, std::move(history)));
  session->writer_ = StreamWriter<v1::WatchResponse>::Start(
      context,
      {.coalesce =
           [](v1::WatchResponse& last, v1::WatchResponse& next) {
             last = std::move(next);
             return true;
           },
       .on_cancel = [session] { session->End(absl::CancelledError("cancelled by the client")); }});
  session->Tick();
  return session;
}

WatchSession::WatchSession(const v1::WatchRequest& request, std::shared_ptr<History> history)
    : interval_(IntervalMs(request)), window_(Window(request)), history_(std::move(history)) {}

void WatchSession::Tick() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (over_) return;
  v1::WatchResponse response;
  *response.mutable_window() = history_->Window(window_);
  *response.mutable_total() = history_->Total();
  response.set_uptime_seconds(history_->UptimeSeconds());
  writer_->Write(std::move(response));  // if a slow reader's queue is full, this summary is dropped
  // A new alarm each time: setting the old one again would destroy the callback that runs this.
  alarm_ = std::make_unique<grpc::Alarm>();
  alarm_->Set(std::chrono::steady_clock::now() + interval_,
              [self = shared_from_this()](bool fired) {
                if (fired) self->Tick();
              });
}

void WatchSession::End(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (over_) return;
  over_ = true;
  alarm_.reset();
  writer_->Finish(status);
}

}  // namespace isobit
