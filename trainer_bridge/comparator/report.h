// Turns gaps and statistics into the comparator's messages.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_REPORT_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "isobit/v1/comparator.pb.h"
#include "trainer_bridge/comparator/gap.h"
#include "trainer_bridge/comparator/statistics.h"

namespace isobit {

// What is kept about a sequence after its tokens have been compared.
struct SequenceOutcome {
  static constexpr size_t kMaxStrip = 256;
  static constexpr size_t kMaxWorst = 4;

  std::string sequence_id;
  GapStatistics statistics;
  std::optional<uint32_t> first_divergence;  // a position in the completion, from 0
  std::optional<uint32_t> first_impossible{};
  // One character per token; of longer sequences, the worst of each run of equal length. '0': equal
  // bits; '1' to '8': by distance; '9': a logprob that no drawn token can have, such as NaN.
  std::string strip{};
  // The worst of the unequal and impossible tokens, in the order of IsWorse.
  std::vector<v1::TokenGap> worst{};
};

// Whether `a` is worse: impossible before others, then larger ulp distance, then larger |dlogp|.
bool IsWorse(const v1::TokenGap& a, const v1::TokenGap& b);

// Compares token by token. Both sides must have passed CheckTokens (pairing.h).
SequenceOutcome CompareTokens(const std::string& sequence_id, const v1::TokenLogprobs& rollout,
                              const v1::TokenLogprobs& scorer);

// The gap of the token at `position` of both sides.
v1::TokenGap MakeTokenGap(uint32_t position, const v1::TokenLogprobs& rollout,
                          const v1::TokenLogprobs& scorer);

v1::GapStatistics ToProto(const GapStatistics& statistics);

// Fills the report's fields that follow from the outcome; the caller fills the rest.
v1::SequenceReport MakeReport(const SequenceOutcome& outcome);

// Merges outcomes, in the order of Add, in constant space.
class SummaryBuilder {
 public:
  void Add(const SequenceOutcome& outcome);

  // Everything except the identities of the sides.
  v1::CompareSummary Build() const;

 private:
  uint64_t num_sequences_ = 0;
  uint64_t num_unequal_sequences_ = 0;
  GapStatistics statistics_;
  std::optional<v1::Divergence> first_divergence_;
  std::optional<v1::Divergence> first_impossible_;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_REPORT_H_
