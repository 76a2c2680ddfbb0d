// Fuzzes the rollout's requests, of both faces: the messages and their validation. The first byte
// chooses which. What passes must fit the model.
#include <cstddef>
#include <cstdint>

#include "common/base/check.h"
#include "rollout/service/rollout_messages.h"
#include "rollout/service/vllm_messages.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/wire_request.h"

namespace {

constexpr isobit::RequestLimits kLimits{.sampling = {.vocab_size = 1000},
                                        .context_length = 256,
                                        .max_batch_tokens = 512,
                                        .kv_tokens = 1024};

void Generate(const isobit::v1::GenerateRequest& message) {
  isobit::GenerationRequest request;
  request.id = message.request_id();
  absl::Status valid = isobit::ReadGenerateRequest(message, request);
  if (valid.ok()) valid = isobit::ValidateRequest(request, kLimits);
  if (!valid.ok()) return isobit::fuzz::CheckRefusal(valid);
  ISOBIT_CHECK(request.prompt.size() + request.sampling.max_tokens <= 256);
  for (const int32_t id : request.prompt) ISOBIT_CHECK(id >= 0 && id < 1000);
  for (const int32_t id : request.sampling.stop_token_ids) ISOBIT_CHECK(id >= 0 && id < 1000);
  ISOBIT_CHECK(isobit::BytesOf(request) < 64 << 10);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using isobit::fuzz::ReadRequest;
  if (size == 0) return 0;
  ++data;
  --size;
  switch (data[-1] % 6) {
    case 0:
      if (const auto message = ReadRequest<isobit::v1::GenerateRequest>(data, size)) {
        Generate(*message);
      }
      break;
    case 1:
      ReadRequest<isobit::v1::AbortRequest>(data, size);
      break;
    case 2:
      if (const auto message = ReadRequest<isobit::v1::PauseGenerationRequest>(data, size)) {
        const auto mode = isobit::PauseModeFromProto(message->mode());
        if (!mode.ok()) isobit::fuzz::CheckRefusal(mode.status());
      }
      break;
    case 3:
      if (const auto message = ReadRequest<isobit::v1::SleepRequest>(data, size)) {
        const auto call = isobit::ReadSleepRequest(*message);
        if (!call.ok()) isobit::fuzz::CheckRefusal(call.status());
      }
      break;
    case 4:
      if (const auto message = ReadRequest<isobit::v1::UpdateWeightsRequest>(data, size)) {
        const auto update = isobit::ReadUpdateWeightsRequest(*message);
        if (!update.ok()) isobit::fuzz::CheckRefusal(update.status());
      }
      break;
    default:
      if (const auto message = ReadRequest<isobit::vllm_wire::GenerateRequest>(data, size)) {
        const auto request = isobit::ReadVllmRequest(*message, kLimits.context_length);
        request.ok() ? Generate(*request) : isobit::fuzz::CheckRefusal(request.status());
      }
  }
  return 0;
}
