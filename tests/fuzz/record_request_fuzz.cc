// Fuzzes the comparator's records: the message, its validation, and the statistics of what passes.
#include <cstddef>
#include <cstdint>

#include "common/base/check.h"
#include "isobit/v1/comparator.pb.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/wire_request.h"
#include "trainer_bridge/comparator/pairing.h"
#include "trainer_bridge/comparator/report.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto message = isobit::fuzz::ReadRequest<isobit::v1::RecordRequest>(data, size);
  if (!message) return 0;
  const isobit::v1::TokenLogprobs& rollout = message->rollout().tokens();
  const isobit::v1::TokenLogprobs& scorer = message->scorer().tokens();
  const absl::Status valid = isobit::CheckTokens(rollout, scorer, message->allow_weight_mismatch());
  if (!valid.ok()) {
    isobit::fuzz::CheckRefusal(valid);
    return 0;
  }
  const isobit::SequenceOutcome outcome = isobit::CompareTokens("id", rollout, scorer);
  isobit::SummaryBuilder builder;
  builder.Add(outcome);
  const isobit::v1::CompareSummary summary = builder.Build();
  ISOBIT_CHECK(summary.statistics().num_tokens() ==
               static_cast<uint64_t>(rollout.token_ids_size()));
  return 0;
}
