// Where the results of one Generate call go: the stream of one of the service's protocols.
// GenerateStream gathers results once, as messages of isobit.v1, and bounds their memory. The
// writer of another protocol converts these messages.
#ifndef ISOBIT_ROLLOUT_SERVICE_GENERATE_WRITER_H_
#define ISOBIT_ROLLOUT_SERVICE_GENERATE_WRITER_H_

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/rpc/stream_writer.h"
#include "isobit/v1/rollout.pb.h"

namespace isobit {

// One thread at a time calls Write and Finish. None of the methods blocks.
class GenerateWriter {
 public:
  virtual ~GenerateWriter() = default;
  // As StreamWriter::Write. After kFull, the caller passes the same message again.
  virtual WriteResult Write(v1::GenerateResponse message) = 0;
  // As StreamWriter::Finish.
  virtual void Finish(absl::Status status) = 0;
  // Thread-safe.
  virtual bool closed() const = 0;
  // The memory of messages that wait here or are in flight. Threads: as for Write.
  virtual size_t held_bytes() const = 0;
};

// As in StreamWriterOptions.
struct WriterEvents {
  std::function<void()> on_cancel;
  std::function<void()> on_writable;
};

// Makes the writer of a call, in its handler.
using OpenGenerateWriter =
    absl::FunctionRef<std::shared_ptr<GenerateWriter>(const WriterEvents& events)>;

// With a bound of one byte, a message goes out only after the one before it, so that tokens
// coalesce in GenerateStream.
template <typename Response>
StreamWriterOptions<Response> OneAtATime(const WriterEvents& events) {
  return {.max_queued_bytes = 1, .on_cancel = events.on_cancel, .on_writable = events.on_writable};
}

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_GENERATE_WRITER_H_
