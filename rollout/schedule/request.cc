// Checks requests and sets up their sequences. See request.h.
#include "rollout/schedule/request.h"

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"

namespace isobit {
namespace {

constexpr size_t kMaxIdBytes = 256;
constexpr std::chrono::milliseconds kMaxTimeout = std::chrono::hours(7 * 24);

absl::Status Fits(int64_t tokens, int64_t bound, absl::string_view what) {
  if (tokens <= bound) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("prompt_token_ids + sampling.max_tokens: expected at most ", bound, " tokens (",
                   what, "), got ", tokens));
}

}  // namespace

absl::Status ValidateRequest(const GenerationRequest& request, const RequestLimits& limits) {
  if (request.id.size() > kMaxIdBytes) {
    return absl::InvalidArgumentError(absl::StrCat("request_id: expected at most ", kMaxIdBytes,
                                                   " bytes, got ", request.id.size()));
  }
  if (request.prompt.empty()) {
    return absl::InvalidArgumentError("prompt_token_ids: expected at least 1 token, got 0");
  }
  ISOBIT_RETURN_IF_ERROR(ValidateSamplingParams(request.sampling, limits.sampling));
  const int64_t tokens =
      static_cast<int64_t>(request.prompt.size()) + int64_t{request.sampling.max_tokens};
  ISOBIT_RETURN_IF_ERROR(Fits(tokens, limits.context_length, "the context length"));
  ISOBIT_RETURN_IF_ERROR(Fits(tokens, limits.max_batch_tokens, "--max_batch_tokens of the server"));
  ISOBIT_RETURN_IF_ERROR(Fits(tokens, limits.kv_tokens, "all KV pages of the server"));
  ISOBIT_RETURN_IF_ERROR(
      CheckTokenIds("prompt_token_ids", request.prompt, limits.sampling.vocab_size));
  const uint64_t most = uint64_t{request.sampling.n} * request.sampling.max_tokens;
  if (request.draft_tokens.size() > most) {
    return absl::InvalidArgumentError(absl::StrCat(
        "draft_token_ids: expected at most ", most,
        " tokens (sampling.n x sampling.max_tokens), got ", request.draft_tokens.size()));
  }
  ISOBIT_RETURN_IF_ERROR(
      CheckTokenIds("draft_token_ids", request.draft_tokens, limits.sampling.vocab_size));
  if (request.draft_lengths.size() > request.sampling.n) {
    return absl::InvalidArgumentError(absl::StrCat("draft_lengths: expected at most ",
                                                   request.sampling.n, " (sampling.n), got ",
                                                   request.draft_lengths.size()));
  }
  const uint64_t length =
      std::accumulate(request.draft_lengths.begin(), request.draft_lengths.end(), uint64_t{0});
  if (!request.draft_lengths.empty() && length != request.draft_tokens.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("draft_lengths: expected a sum of ", request.draft_tokens.size(),
                     " (the number of draft_token_ids), got ", length));
  }
  if (request.timeout &&
      (*request.timeout < std::chrono::milliseconds(1) || *request.timeout > kMaxTimeout)) {
    return absl::InvalidArgumentError(absl::StrCat("timeout_ms: expected a number in [1, ",
                                                   kMaxTimeout.count(), "], got ",
                                                   request.timeout->count()));
  }
  return absl::OkStatus();
}

size_t BytesOf(const GenerationRequest& request) {
  const SamplingParams& sampling = request.sampling;
  const size_t sample = sizeof(Sequence) + request.prompt.size() * sizeof(int32_t);
  return sizeof(Request) + request.id.size() + request.client.size() + sampling.n * sample +
         (request.draft_tokens.size() + request.draft_lengths.size() +
          sampling.stop_token_ids.capacity()) *
             sizeof(int32_t) +
         sampling.logit_bias.capacity() * sizeof(sampling.logit_bias[0]);
}

Request::Request(GenerationRequest request, uint64_t seed, std::shared_ptr<RequestSink> sink)
    : id(std::move(request.id)),
      client(std::move(request.client)),
      num_prompt_tokens(static_cast<uint32_t>(request.prompt.size())),
      max_tokens(request.sampling.max_tokens),
      logprobs(request.sampling.logprobs),
      raw_logprobs(request.raw_logprobs),
      seed(seed),
      sampling(std::move(request.sampling)),
      draft_tokens(std::move(request.draft_tokens)),
      draft_lengths(std::move(request.draft_lengths)),
      speculate(request.speculate),
      deterministic(request.deterministic),
      expiry(request.timeout ? std::chrono::steady_clock::now() + *request.timeout
                             : std::chrono::steady_clock::time_point::max()),
      sink(std::move(sink)),
      num_unfinished(sampling.n) {
  samples.reserve(sampling.n);
  for (uint32_t sample = 0; sample < sampling.n; ++sample) {
    samples.push_back(std::unique_ptr<Sequence>(
        new Sequence{.request = this, .sample = sample, .tokens = request.prompt}));
  }
}

absl::Span<const int32_t> Request::DraftOf(uint32_t sample) const {
  if (draft_lengths.empty()) return draft_tokens;
  const auto own = draft_lengths.begin() + sample % draft_lengths.size();
  return absl::MakeConstSpan(draft_tokens)
      .subspan(std::accumulate(draft_lengths.begin(), own, size_t{0}), *own);
}

void Request::BeginSampling(Sequence& sequence, absl::Span<const int32_t> eos_token_ids) const {
  sequence.sampling = std::make_unique<SequenceSampling>(sampling, eos_token_ids, seed,
                                                         sequence.sample, sequence.tokens);
}

}  // namespace isobit
