// The tap's stream, the queue of samples, and the calls to the scorer.
#include "trainer_bridge/comparator/shadow.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/rpc/steady_time.h"
#include "trainer_bridge/comparator/pairing.h"

namespace isobit {
namespace {

constexpr char kSamples[] = "isobit_shadow_samples_total";
constexpr char kSamplesHelp[] =
    "Samples of the rollout's traffic: compared, dropped as the scorer was slow, skipped as the "
    "weights had changed, or failed.";

std::string SequenceId(const v1::TappedSample& sample) {
  return absl::StrCat(sample.request_id(), "/", sample.complete().index());
}

v1::ScoreRequest ScoreRequestOf(const v1::TappedSample& sample) {
  v1::ScoreRequest request;
  v1::ScoreSequence* const sequence = request.add_sequences();
  sequence->set_sequence_id(SequenceId(sample).substr(0, 256));
  *sequence->mutable_prompt_token_ids() = sample.prompt_token_ids();
  *sequence->mutable_completion_token_ids() = sample.tokens().token_ids();
  *request.mutable_sampling() = sample.sampling();
  request.set_logprob_mode(sample.complete().logprob_mode());
  request.set_weight_version(sample.complete().weight_version().id());
  return request;
}

}  // namespace

ShadowMetrics::ShadowMetrics(Metrics& metrics)
    : compared(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "compared"}})),
      dropped(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "dropped"}})),
      skipped(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "skipped"}})),
      failed(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "failed"}})) {}

std::shared_ptr<Shadow> Shadow::Start(std::shared_ptr<const Upstreams> upstreams,
                                      std::shared_ptr<History> history,
                                      std::shared_ptr<Recording> recording,
                                      const ShadowMetrics& metrics, double fraction) {
  const std::shared_ptr<Shadow> shadow(new Shadow(std::move(upstreams), std::move(history),
                                                  std::move(recording), metrics, fraction));
  shadow->OpenTap();
  return shadow;
}

Shadow::Shadow(std::shared_ptr<const Upstreams> upstreams, std::shared_ptr<History> history,
               std::shared_ptr<Recording> recording, const ShadowMetrics& metrics, double fraction)
    : upstreams_(std::move(upstreams)),
      history_(std::move(history)),
      recording_(std::move(recording)),
      fraction_(fraction),
      metrics_(metrics) {}

void Shadow::Stop() {
  const std::lock_guard lock(mutex_);
  over_ = true;
  alarm_.reset();
  queue_.clear();
  if (tap_ != nullptr) tap_->TryCancel();
  for (const auto& score : scores_) score->TryCancel();
}

void Shadow::OpenTap() {
  const std::lock_guard lock(mutex_);
  if (over_) return;
  v1::TapRequest request;
  request.set_fraction(fraction_);
  tap_ = TapStream::Begin(
      SteadyTime::max(), std::move(request),
      [this](auto* context, auto* message, auto* reactor) {
        upstreams_->rollout->async()->Tap(context, message, reactor);
      },
      [self = shared_from_this()](const v1::TappedSample& sample) { self->OnSample(sample); },
      [self = shared_from_this()](const absl::Status& status, const TapStream::Context& call) {
        self->OnTapDone(status, call);
      });
}

void Shadow::OnSample(const v1::TappedSample& sample) {
  const std::lock_guard lock(mutex_);
  if (over_) return;
  if (!std::exchange(is_connected_, true)) {
    ISOBIT_LOG(Info) << "shadow: compares " << fraction_ << " of the rollout's samples";
  }
  retry_ = kMinRetry;
  const size_t bytes = sample.SpaceUsedLong();
  if (queued_bytes_ + bytes > kMaxQueuedBytes) return metrics_.dropped.Increment();
  queued_bytes_ += bytes;
  queue_.push_back(sample);
  StartScores();
}

void Shadow::OnTapDone(const absl::Status& status, const TapStream::Context& call) {
  const std::lock_guard lock(mutex_);
  if (tap_ == call) tap_ = nullptr;
  if (over_) return;
  if (std::exchange(is_connected_, false) || retry_ == kMinRetry) {
    ISOBIT_LOG(Warning) << "shadow: the rollout's tap has ended: " << status.ToString();
  }
  // A new alarm each time: setting the old one again would destroy the callback that runs this.
  alarm_ = std::make_unique<grpc::Alarm>();
  alarm_->Set(std::chrono::steady_clock::now() + retry_, [self = shared_from_this()](bool fired) {
    if (fired) self->OpenTap();
  });
  retry_ = std::min(2 * retry_, kMaxRetry);
}

void Shadow::StartScores() {
  while (scores_.size() < kMaxScoring && !queue_.empty()) {
    const auto scoring = std::make_shared<Scoring>();
    scoring->sample = std::move(queue_.front());
    queue_.pop_front();
    queued_bytes_ -= std::min(queued_bytes_, scoring->sample.SpaceUsedLong());
    if (queue_.empty()) queued_bytes_ = 0;
    scores_.insert(ScoreStream::Begin(
        std::chrono::steady_clock::now() + kScoreTimeout, ScoreRequestOf(scoring->sample),
        [this](auto* context, auto* message, auto* reactor) {
          upstreams_->scorer->async()->Score(context, message, reactor);
        },
        [self = shared_from_this(), scoring](const v1::ScoreResponse& response) {
          self->OnScored(*scoring, response);
        },
        [self = shared_from_this(), scoring](const absl::Status& status,
                                             const ScoreStream::Context& call) {
          self->OnScoreDone(*scoring, status, call);
        }));
  }
}

void Shadow::OnScored(Scoring& scoring, const v1::ScoreResponse& response) {
  if (std::exchange(scoring.is_counted, true)) return;
  Compare(scoring.sample, response);
}

void Shadow::Compare(const v1::TappedSample& sample, const v1::ScoreResponse& response) {
  absl::Status comparable = CheckSides(IdentityOf(sample.complete()), IdentityOf(response),
                                       /*allow_weight_mismatch=*/false);
  if (comparable.ok()) {
    comparable =
        CheckTokens(sample.tokens(), response.completion(), /*allow_weight_mismatch=*/false);
  }
  if (!comparable.ok()) {
    history_->Refuse(comparable, MissingTokens(sample.tokens(), response.completion()));
    return metrics_.skipped.Increment();
  }
  history_->Add(CompareTokens(SequenceId(sample), sample.tokens(), response.completion()));
  if (recording_ != nullptr) recording_->Add(sample);
  metrics_.compared.Increment();
}

void Shadow::OnScoreDone(const Scoring& scoring, const absl::Status& status,
                         const ScoreStream::Context& call) {
  const std::lock_guard lock(mutex_);
  scores_.erase(call);
  if (over_) return;
  if (!scoring.is_counted) {
    // FAILED_PRECONDITION: the scorer serves other weights by now, or not yet.
    (absl::IsFailedPrecondition(status) ? metrics_.skipped : metrics_.failed).Increment();
  }
  const bool answers = scoring.is_counted || absl::IsFailedPrecondition(status);
  if (answers != std::exchange(scorer_answers_, answers)) {
    ISOBIT_LOG(Warning) << "shadow: the scorer "
                        << (answers ? "answers again" : absl::StrCat("fails: ", status.ToString()));
  }
  StartScores();
}

}  // namespace isobit
