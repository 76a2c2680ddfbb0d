// The server's end of a response stream that another thread fills. It has a bounded queue and one
// write in flight. It finishes exactly once: at the producer's Finish, at cancellation or when the
// connection breaks.
//
//   auto writer = StreamWriter<Response>::Start(context, {.on_cancel = [...] { ... }});
//   engine.Enqueue(request, writer);   // engine thread: writer->Write(...), writer->Finish(...)
//   return writer.get();
//
// A slow reader affects only its own stream: Write never blocks. Once the queue holds
// `max_queued_bytes`, Write takes nothing more and returns kFull. The producer then either ends the
// request (Finish(RESOURCE_EXHAUSTED); queued messages are still sent) or pauses until
// `on_writable`. With `coalesce`, waiting messages are merged, so that a reader that resumes gets
// few large ones.
#ifndef ISOBIT_COMMON_RPC_STREAM_WRITER_H_
#define ISOBIT_COMMON_RPC_STREAM_WRITER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "proto/isobit/status_convert.h"

namespace isobit {

enum class WriteResult {
  kQueued,
  kFull,    // the queue is at its bound; the message was not taken
  kClosed,  // the stream is finished, cancelled or broken; the message was not taken
};

template <typename Response>
struct StreamWriterOptions {
  // Bytes of serialised messages that may wait or be in flight. A single message of any size is
  // always taken.
  size_t max_queued_bytes = 4 << 20;
  // Merges `next` into `last`, the newest message waiting, and returns true; or returns false and
  // leaves both alone. Called under the writer's lock: it must not call the writer.
  std::function<bool(Response& last, Response& next)> coalesce = nullptr;
  // The client has gone or the deadline has passed; nothing can be written any more. Called at most
  // once, without the lock, never after OnDone; must not block.
  std::function<void()> on_cancel = nullptr;
  // After a kFull: the queue has shrunk to half its
  // bound. Called without the lock; must not block.
  std::function<void()> on_writable = nullptr;
};

template <typename Response>
class StreamWriter final : public grpc::ServerWriteReactor<Response> {
 public:
  using Options = StreamWriterOptions<Response>;

  // A writer for the call of `context`. It lives until both gRPC and all producers have released
  // it. Call it in the handler, and return get() there.
  static std::shared_ptr<StreamWriter> Start(grpc::CallbackServerContext* context,
                                             Options options = {}) {
    std::shared_ptr<StreamWriter> writer(new StreamWriter(context, std::move(options)));
    writer->self_ = writer;
    return writer;
  }

  // Queues `message`. Thread-safe, never blocks.
  WriteResult Write(Response message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return WriteResult::kClosed;
    if (queued_bytes_ >= options_.max_queued_bytes) {
      was_full_ = true;
      return WriteResult::kFull;
    }
    const size_t bytes = message.ByteSizeLong();
    queued_bytes_ += bytes;
    if (!queue_.empty() && options_.coalesce && options_.coalesce(queue_.back().message, message)) {
      queue_.back().bytes += bytes;
    } else {
      queue_.push_back({std::move(message), bytes});
    }
    Proceed();
    return WriteResult::kQueued;
  }

  // Ends the stream with `status` once the queue is written. Later calls and writes have no effect.
  // Thread-safe, never blocks.
  void Finish(absl::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return;
    closing_ = true;
    final_status_ = std::move(status);
    Proceed();
  }

  // Bytes of serialised messages that wait or are in flight. Thread-safe.
  size_t queued_bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return queued_bytes_;
  }

  // True once Write can only answer kClosed. Thread-safe.
  bool closed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return closing_;
  }

 private:
  struct Queued {
    Response message;
    size_t bytes;
  };

  StreamWriter(grpc::CallbackServerContext* context, Options options)
      : context_(context), options_(std::move(options)) {}

  // Starts the next write or the end, if nothing is in flight. Holds mutex_.
  void Proceed() {
    if (in_flight_ || finished_) return;
    if (!queue_.empty()) {
      in_flight_.emplace(std::move(queue_.front()));
      queue_.pop_front();
      this->StartWrite(&in_flight_->message);
    } else if (final_status_) {
      FinishNow(*final_status_);
    }
  }

  // Holds mutex_. INVARIANT: StartWrite never follows Finish (StreamWriterTest.*Cancel*).
  void FinishNow(const absl::Status& status) {
    finished_ = true;
    grpc::ServerWriteReactor<Response>::Finish(ToGrpcStatus(status, *context_));
  }

  void OnWriteDone(bool ok) override {
    bool writable = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queued_bytes_ -= in_flight_->bytes;
      in_flight_.reset();
      if (!ok) {
        Break();
      } else {
        writable = was_full_ && !closing_ && queued_bytes_ <= options_.max_queued_bytes / 2;
        if (writable) was_full_ = false;
        Proceed();
      }
    }
    if (writable && options_.on_writable) options_.on_writable();
    if (!ok) NotifyCancel();
  }

  void OnCancel() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Break();
    }
    NotifyCancel();
  }

  // The client no longer reads: drops the queue and finishes. Holds mutex_.
  void Break() {
    closing_ = true;
    queue_.clear();
    queued_bytes_ = in_flight_ ? in_flight_->bytes : 0;
    if (!finished_)
      FinishNow(absl::CancelledError("the client is gone or its deadline has passed"));
  }

  void NotifyCancel() {
    std::function<void()> on_cancel;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      on_cancel = std::exchange(options_.on_cancel, nullptr);
    }
    if (on_cancel) on_cancel();
  }

  // The callbacks may own the producer, and the producer the writer: this breaks the cycle.
  void OnDone() override {
    const std::shared_ptr<StreamWriter> self = std::move(self_);
    Options options;
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = finished_ = true;
    std::swap(options, options_);
  }

  grpc::CallbackServerContext* const context_;
  std::shared_ptr<StreamWriter> self_;  // until OnDone

  mutable std::mutex mutex_;  // guards all below
  Options options_;
  std::deque<Queued> queue_;  // waits until in_flight_ is written
  std::optional<Queued> in_flight_;
  size_t queued_bytes_ = 0;  // of queue_ and in_flight_
  bool was_full_ = false;    // on_writable must be called
  bool closing_ = false;     // no further message is taken
  bool finished_ = false;    // Finish was called on gRPC
  std::optional<absl::Status> final_status_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_STREAM_WRITER_H_
