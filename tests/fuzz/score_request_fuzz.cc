// Fuzzes the scorer's requests: the message and its validation. What passes must fit the model.
#include <cstddef>
#include <cstdint>

#include "common/base/check.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/wire_request.h"
#include "trainer_bridge/scorer/score_messages.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr isobit::ScoreLimits kLimits{.vocab_size = 1000, .max_context = 256};
  const auto message = isobit::fuzz::ReadRequest<isobit::v1::ScoreRequest>(data, size);
  if (!message) return 0;
  const auto request = isobit::ParseScoreRequest(*message, kLimits);
  if (!request.ok()) {
    isobit::fuzz::CheckRefusal(request.status());
    return 0;
  }
  ISOBIT_CHECK(!request->inputs.empty());
  for (const isobit::ScoreInput& input : request->inputs) {
    ISOBIT_CHECK(input.prompt.size() + input.completion.size() <= 256);
    for (const auto* ids : {&input.prompt, &input.completion}) {
      for (const int32_t id : *ids) ISOBIT_CHECK(id >= 0 && id < kLimits.vocab_size);
    }
  }
  return 0;
}
