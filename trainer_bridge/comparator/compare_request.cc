// Reads a Compare request.
#include "trainer_bridge/comparator/compare_request.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/config/sampling_params.h"
#include "trainer_bridge/comparator/pairing.h"

namespace isobit {
namespace {

constexpr uint32_t kDefaultConcurrency = 8;
constexpr uint32_t kMaxConcurrency = 256;
constexpr uint64_t kMaxSequences = 65536;

}  // namespace

uint32_t SamplesPerPrompt(const v1::CompareRequest& request) {
  return request.sampling().has_n() ? request.sampling().n() : 1;
}

uint32_t Concurrency(const v1::CompareRequest& request) {
  return request.has_max_concurrency() ? request.max_concurrency() : kDefaultConcurrency;
}

absl::Status ValidateCompareRequest(const v1::CompareRequest& request) {
  if (request.prompts().empty()) {
    return absl::InvalidArgumentError("prompts: none, expected at least one");
  }
  for (int i = 0; i < request.prompts_size(); ++i) {
    ISOBIT_RETURN_IF_ERROR(
        CheckId(absl::StrCat("prompts[", i, "].prompt_id"), request.prompts(i).prompt_id()));
  }
  const uint64_t samples = SamplesPerPrompt(request);
  if (samples == 0) return absl::InvalidArgumentError("sampling.n: 0, expected at least 1");
  const uint64_t sequences = samples * static_cast<uint64_t>(request.prompts_size());
  if (sequences > kMaxSequences) {
    return absl::InvalidArgumentError(absl::StrCat("prompts times sampling.n: ", sequences,
                                                   ", expected at most ", kMaxSequences));
  }
  const uint32_t concurrency = Concurrency(request);
  if (concurrency < 1 || concurrency > kMaxConcurrency) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_concurrency: ", concurrency, ", expected 1 to ", kMaxConcurrency));
  }
  return absl::OkStatus();
}

QuotaAmounts AmountsOf(const v1::CompareRequest& request) {
  constexpr int64_t kMost = int64_t{1} << 60;
  const v1::SamplingParams& sampling = request.sampling();
  // In float64, which cannot wrap: any of the three factors may be out of its range.
  const double generated =
      std::min(1.0 * Concurrency(request), 1.0 * request.prompts_size()) *
      SamplesPerPrompt(request) *
      (sampling.has_max_tokens() ? sampling.max_tokens() : SamplingParams().max_tokens);
  int64_t tokens = static_cast<int64_t>(std::min(generated, 1.0 * kMost));
  for (const v1::ComparePrompt& prompt : request.prompts()) tokens += prompt.token_ids_size();
  return {.requests = 1, .streams = 1, .tokens = tokens};
}

}  // namespace isobit
