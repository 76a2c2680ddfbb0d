// One Generate call of any protocol: takes a request's tokens from the engine and writes them as
// fast as the client reads.
//
// One message is in flight. Tokens that come meanwhile are coalesced, for each sample, into few
// large messages, so that a slow reader delays no other call. A call's backlog is bounded: beyond
// it the request ends with RESOURCE_EXHAUSTED. With final_only, a sample's tokens are kept until it
// ends; with a chunk interval, for that long. The memory of all calls, for requests and for unread
// results, is also bounded, per client and in total.
#ifndef ISOBIT_ROLLOUT_SERVICE_GENERATE_STREAM_H_
#define ISOBIT_ROLLOUT_SERVICE_GENERATE_STREAM_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/access/held_bytes.h"
#include "isobit/v1/rollout.pb.h"
#include "rollout/engine/engine.h"
#include "rollout/service/generate_writer.h"
#include "rollout/service/generation_metrics.h"
#include "rollout/service/sample_tap.h"

namespace isobit {

struct StreamLimits {
  size_t max_backlog_bytes = 16 << 20;  // unread tokens of a stream without final_only
  ByteLimits requests{.total = 256 << 20, .client_share = 0.5};  // that wait or run
  ByteLimits results{.total = 1 << 30, .client_share = 0.5};     // unread, and the calls' own
};

// The memory bounds that all streams share, and what is in use of them.
struct StreamMemory {
  explicit StreamMemory(const StreamLimits& limits);

  const size_t max_backlog_bytes;
  const std::shared_ptr<ByteBudget> requests;
  const std::shared_ptr<ByteBudget> results;
};

// When a sample's tokens are written.
struct ChunkPacing {
  bool final_only = false;                // only when the sample ends
  std::chrono::milliseconds interval{0};  // at least, from one chunk to the next
};

// Thread-safe.
class GenerateStream final : public RequestSink,
                             public std::enable_shared_from_this<GenerateStream> {
 public:
  // `engine`, `memory` and `metrics` outlive the call. `fingerprint` goes into each sample's end.
  // The call's memory is charged to `client`.
  GenerateStream(Engine& engine, v1::Fingerprint fingerprint, const StreamMemory& memory,
                 const std::string& client, const GenerationMetrics& metrics, ChunkPacing pacing);

  // Call it once, in the handler. Opens the call's writer, then submits `request`. If `error` is an
  // error, or if a memory bound is reached (RESOURCE_EXHAUSTED), it ends the call instead. tapped:
  // also gets the request's tokens; may be null.
  void Start(OpenGenerateWriter open, GenerationRequest request, const absl::Status& error,
             std::unique_ptr<TappedRequest> tapped = nullptr);

  void OnToken(uint32_t sample, SampledToken token) override;
  void Flush() override;
  void OnSampleEnd(uint32_t sample, SampleEnd end) override;
  void OnDone(const absl::Status& status) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Backlog {
    std::deque<SampledToken> tokens;
    bool is_ready = false;                                    // it is in ready_
    Clock::time_point next_chunk = Clock::time_point::min();  // not earlier
    std::optional<v1::GenerateComplete> complete;
  };

  absl::StatusOr<uint64_t> Submit(GenerationRequest request);
  void CancelRequest();
  // Holds mutex_. Ends call and request with RESOURCE_EXHAUSTED if too much is unread.
  void CheckBacklog();
  // Holds mutex_. Lets the sample write in its turn.
  void MakeReady(uint32_t sample, Backlog& backlog);
  // Holds mutex_. Writes until the writer is full or nothing is left.
  void Write();
  // Holds mutex_. The next message of a sample with a backlog, and what to do once it is written.
  v1::GenerateResponse NextMessage(uint32_t sample) const;
  void DropWritten(uint32_t sample);
  void DropBacklog();
  void OnWritable();

  Engine& engine_;
  const v1::Fingerprint fingerprint_;
  const StreamMemory& memory_;
  const ChunkPacing pacing_;
  // Set by Start, before anything can call the methods that read them.
  std::string request_id_;
  v1::LogprobMode logprob_mode_ = v1::LOGPROB_MODE_PROCESSED;
  std::shared_ptr<GenerateWriter> writer_;
  // Both are used only on the thread that calls sinks.
  RequestMeasurement measurement_;
  std::unique_ptr<TappedRequest> tapped_;

  std::mutex mutex_;  // guards all below
  uint64_t ticket_ = 0;
  HeldBytes request_;                    // until the engine is done with it
  HeldBytes results_;                    // until the call is over
  std::map<uint32_t, Backlog> backlog_;  // by sample
  std::deque<uint32_t> ready_;           // samples with a backlog to write, each once, in turn
  size_t backlog_bytes_ = 0;
  bool is_full_ = false;  // OnWritable will be called
  std::optional<absl::Status> done_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_GENERATE_STREAM_H_
