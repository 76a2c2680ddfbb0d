// The shadow: has a share of the rollout's own traffic scored and compared, without a client's
// request.
//
// It reads the rollout's tap. A sample that finds the queue full is dropped and counted, so that
// nothing has to wait. If the tap is lost, it is opened again.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_SHADOW_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_SHADOW_H_

#include <grpcpp/alarm.h>
#include <grpcpp/client_context.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "absl/status/status.h"
#include "common/metrics/metrics.h"
#include "isobit/v1/rollout.pb.h"
#include "isobit/v1/scorer.pb.h"
#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/recording.h"
#include "trainer_bridge/comparator/upstreams.h"

namespace isobit {

// Counts samples by outcome.
struct ShadowMetrics {
  explicit ShadowMetrics(Metrics& metrics);

  prometheus::Counter& compared;
  prometheus::Counter& dropped;
  prometheus::Counter& skipped;
  prometheus::Counter& failed;
};

// Thread-safe.
class Shadow final : public std::enable_shared_from_this<Shadow> {
 public:
  static constexpr size_t kMaxScoring = 32;            // samples being scored at the same time
  static constexpr size_t kMaxQueuedBytes = 64 << 20;  // of samples waiting to be scored
  // Time between two attempts to open the tap; it doubles from the minimum to the maximum.
  static constexpr std::chrono::milliseconds kMinRetry{200};
  static constexpr std::chrono::milliseconds kMaxRetry{5000};
  static constexpr std::chrono::seconds kScoreTimeout{120};

  // fraction: in (0, 1]. `metrics` outlive the object. recording: gets the compared samples; may be
  // null.
  static std::shared_ptr<Shadow> Start(std::shared_ptr<const Upstreams> upstreams,
                                       std::shared_ptr<History> history,
                                       std::shared_ptr<Recording> recording,
                                       const ShadowMetrics& metrics, double fraction);

  // Ends the tap and all scoring.
  void Stop();

 private:
  using TapStream = UpstreamStream<v1::TapRequest, v1::TappedSample>;
  using ScoreStream = UpstreamStream<v1::ScoreRequest, v1::ScoreResponse>;

  // A sample that is being scored.
  struct Scoring {
    v1::TappedSample sample;
    bool is_counted = false;
  };

  Shadow(std::shared_ptr<const Upstreams> upstreams, std::shared_ptr<History> history,
         std::shared_ptr<Recording> recording, const ShadowMetrics& metrics, double fraction);

  // gRPC threads call these.
  void OpenTap();
  void OnSample(const v1::TappedSample& sample);
  void OnTapDone(const absl::Status& status, const TapStream::Context& call);
  void OnScored(Scoring& scoring, const v1::ScoreResponse& response);
  void OnScoreDone(const Scoring& scoring, const absl::Status& status,
                   const ScoreStream::Context& call);

  void StartScores();  // holds mutex_
  // Counts the outcome of a score; compares if the sides match.
  void Compare(const v1::TappedSample& sample, const v1::ScoreResponse& response);

  const std::shared_ptr<const Upstreams> upstreams_;
  const std::shared_ptr<History> history_;
  const std::shared_ptr<Recording> recording_;
  const double fraction_;
  const ShadowMetrics& metrics_;

  std::mutex mutex_;  // guards all below
  bool over_ = false;
  bool is_connected_ = false;
  std::chrono::milliseconds retry_ = kMinRetry;
  std::unique_ptr<grpc::Alarm> alarm_;
  TapStream::Context tap_;  // null: the tap is not open
  std::unordered_set<ScoreStream::Context> scores_;
  std::deque<v1::TappedSample> queue_;
  size_t queued_bytes_ = 0;
  bool scorer_answers_ = true;  // at the last score
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_SHADOW_H_
