// The readers, the choice of samples by hash, and the copies of their tokens.
#include "rollout/service/sample_tap.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"

namespace isobit {
namespace {

// A token's entries in TokenLogprobs, whose arrays grow by doubling.
constexpr size_t kTokenBytes = 32;
constexpr size_t kTokenBlock = 1024;

constexpr char kSamples[] = "isobit_tap_samples_total";
constexpr char kSamplesHelp[] =
    "Samples chosen for taps: sent to a reader, dropped as it was slow or memory short, or skipped "
    "as they cannot be compared.";

// A hash below it chooses a sample.
uint64_t ThresholdOf(double fraction) {
  constexpr double kAll = 18446744073709551616.0;  // 2^64
  return fraction >= 1 ? std::numeric_limits<uint64_t>::max()
                       : std::max<uint64_t>(1, static_cast<uint64_t>(fraction * kAll));
}

uint64_t HashOf(const std::string& request_id, uint32_t index) {
  return absl::HashOf(request_id, index);
}

bool HasOneVersion(const v1::TokenLogprobs& tokens) {
  const auto& versions = tokens.weight_versions();
  return std::all_of(versions.begin(), versions.end(),
                     [&](uint64_t version) { return version == versions[0]; });
}

}  // namespace

SampleTap::SampleTap(Metrics& metrics)
    : tokens_(
          std::make_shared<ByteBudget>("samples for taps", ByteLimits{.total = kMaxTokenBytes})),
      sent_(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "sent"}})),
      dropped_(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "dropped"}})),
      skipped_(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "skipped"}})) {}

grpc::ServerWriteReactor<v1::TappedSample>* SampleTap::Open(grpc::CallbackServerContext* context,
                                                            const v1::TapRequest& request) {
  // Filled, under the lock, before on_cancel reads it.
  const auto self = std::make_shared<const Writer*>(nullptr);
  const std::lock_guard lock(mutex_);
  const auto writer = Writer::Start(
      context, {.max_queued_bytes = kMaxQueuedBytes, .on_cancel = [this, self] { Forget(self); }});
  *self = writer.get();
  if (const absl::Status open = CheckOpen(request); !open.ok()) {
    writer->Finish(open);
    return writer.get();
  }
  readers_.push_back({ThresholdOf(request.fraction()), writer});
  UpdateThreshold();
  return writer.get();
}

absl::Status SampleTap::CheckOpen(const v1::TapRequest& request) const {
  // Written so that NaN fails.
  if (!(request.fraction() > 0 && request.fraction() <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("fraction: ", request.fraction(), ", expected more than 0 and at most 1"));
  }
  if (closed_) return absl::UnavailableError("the rollout is draining");
  if (readers_.size() < kMaxReaders) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(readers_.size(), " taps are open, expected at most ", kMaxReaders));
}

void SampleTap::Close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const Reader& reader : readers_) {
    reader.writer->Finish(absl::UnavailableError("the rollout is draining"));
  }
  readers_.clear();
  UpdateThreshold();
}

void SampleTap::Forget(const std::shared_ptr<const Writer*>& writer) {
  std::shared_ptr<Writer> gone;  // freed without the lock
  const std::lock_guard lock(mutex_);
  const auto reader = std::find_if(readers_.begin(), readers_.end(), [&](const Reader& known) {
    return known.writer.get() == *writer;
  });
  if (reader == readers_.end()) return;
  gone = std::move(reader->writer);
  gone->Finish(absl::CancelledError("cancelled by the client"));
  readers_.erase(reader);
  UpdateThreshold();
}

void SampleTap::UpdateThreshold() {
  uint64_t highest = 0;
  for (const Reader& reader : readers_) highest = std::max(highest, reader.threshold);
  threshold_.store(highest, std::memory_order_relaxed);
}

bool SampleTap::Wants(const std::string& request_id, uint32_t index) const {
  const uint64_t threshold = threshold_.load(std::memory_order_relaxed);
  return threshold > 0 && HashOf(request_id, index) <= threshold;
}

void SampleTap::Offer(const v1::TappedSample& sample) {
  const uint64_t hash = HashOf(sample.request_id(), sample.complete().index());
  const std::lock_guard lock(mutex_);
  for (const Reader& reader : readers_) {
    if (hash > reader.threshold) continue;
    const bool is_sent = reader.writer->Write(sample) == WriteResult::kQueued;
    (is_sent ? sent_ : dropped_).Increment();
  }
}

TappedRequest::TappedRequest(SampleTap& tap, const std::string& request_id,
                             const v1::GenerateRequest& request)
    : tap_(tap), held_(tap.OpenTokens()) {
  const uint32_t n = request.sampling().has_n() ? request.sampling().n() : 1;
  is_chosen_.resize(n);
  for (uint32_t i = 0; i < n; ++i) is_chosen_[i] = tap.Wants(request_id, i);
  tokens_.resize(n);
  origin_.set_request_id(request_id);
  *origin_.mutable_prompt_token_ids() = request.prompt_token_ids();
  *origin_.mutable_sampling() = request.sampling();
  origin_.mutable_sampling()->clear_seed();
  origin_.mutable_sampling()->clear_logprobs();
}

void TappedRequest::AddToken(uint32_t sample, int32_t token_id, float logprob,
                             uint64_t weight_version) {
  if (!is_chosen_[sample]) return;
  if (num_tokens_ == num_held_) {
    const size_t bytes = origin_.ByteSizeLong() + (num_held_ + kTokenBlock) * kTokenBytes;
    if (!held_.Resize(bytes).ok()) {
      is_chosen_[sample] = false;
      tokens_[sample] = v1::TokenLogprobs();
      return tap_.CountDropped();
    }
    num_held_ += kTokenBlock;
  }
  ++num_tokens_;
  tokens_[sample].add_token_ids(static_cast<uint32_t>(token_id));
  tokens_[sample].add_logprobs(logprob);
  tokens_[sample].add_weight_versions(weight_version);
}

void TappedRequest::End(const v1::GenerateComplete& complete) {
  const uint32_t sample = complete.index();
  if (!is_chosen_[sample]) return;
  is_chosen_[sample] = false;
  v1::TappedSample whole = origin_;
  *whole.mutable_tokens() = std::exchange(tokens_[sample], v1::TokenLogprobs());
  if (whole.tokens().token_ids().empty() || !HasOneVersion(whole.tokens())) {
    return tap_.CountSkipped();
  }
  *whole.mutable_complete() = complete;
  tap_.Offer(whole);
}

}  // namespace isobit
