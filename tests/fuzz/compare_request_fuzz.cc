// Fuzzes the comparator's Compare requests: reading the message, counting its quota, validating it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "common/base/check.h"
#include "common/config/sampling_params.h"
#include "isobit/v1/comparator.pb.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/wire_request.h"
#include "trainer_bridge/comparator/compare_request.h"

namespace {

int64_t PromptTokens(const isobit::v1::CompareRequest& message) {
  int64_t tokens = 0;
  for (const isobit::v1::ComparePrompt& prompt : message.prompts()) {
    tokens += prompt.token_ids_size();
  }
  return tokens;
}

// The tokens that a valid request may have generated at one time: at most 2^8 * 2^16 * 2^32.
int64_t GeneratedTokens(const isobit::v1::CompareRequest& message) {
  const isobit::v1::SamplingParams& sampling = message.sampling();
  const int64_t max_tokens =
      sampling.has_max_tokens() ? sampling.max_tokens() : isobit::SamplingParams().max_tokens;
  return std::min<int64_t>(isobit::Concurrency(message), message.prompts_size()) *
         isobit::SamplesPerPrompt(message) * max_tokens;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto message = isobit::fuzz::ReadRequest<isobit::v1::CompareRequest>(data, size);
  if (!message) return 0;
  const int64_t prompt_tokens = PromptTokens(*message);
  // The quota counts a request before it is validated.
  const int64_t generated = isobit::AmountsOf(*message).tokens - prompt_tokens;
  ISOBIT_CHECK(generated >= 0 && generated <= int64_t{1} << 60);
  const absl::Status valid = isobit::ValidateCompareRequest(*message);
  if (!valid.ok()) {
    isobit::fuzz::CheckRefusal(valid);
    return 0;
  }
  for (const isobit::v1::ComparePrompt& prompt : message->prompts()) {
    ISOBIT_CHECK(prompt.prompt_id().size() <= 256);
  }
  const uint64_t samples = isobit::SamplesPerPrompt(*message);
  const uint64_t sequences = samples * static_cast<uint64_t>(message->prompts_size());
  ISOBIT_CHECK(sequences >= 1 && samples <= 65536 && sequences <= 65536);
  ISOBIT_CHECK(isobit::Concurrency(*message) >= 1 && isobit::Concurrency(*message) <= 256);
  // The quota counts in float64, which rounds.
  const int64_t expected = GeneratedTokens(*message);
  ISOBIT_CHECK(std::abs(generated - expected) <= expected >> 52);
  return 0;
}
