// Converts between the scorer's wire messages and the engine's types.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_MESSAGES_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "isobit/v1/scorer.pb.h"
#include "trainer_bridge/scorer/score_job.h"
#include "trainer_bridge/scorer/scorer.h"

namespace isobit {

struct ScoreLimits {
  int32_t vocab_size = 0;
  int64_t max_context = 0;      // tokens of one sequence
  size_t max_sequences = 1024;  // of one request
  uint32_t max_logprobs = 64;
};

struct ScoreRequest {
  std::vector<ScoreInput> inputs;
  ScoreOptions options;
};

// INVALID_ARGUMENT naming field, value and bound: the request is too large, or has no or too many
// sequences; a prompt is empty; a token id is outside the vocabulary; a sequence exceeds
// max_context or has nothing to score; the logprob mode is unknown; ValidateSamplingParams fails;
// or a response would not fit into one message.
absl::StatusOr<ScoreRequest> ParseScoreRequest(const v1::ScoreRequest& request,
                                               const ScoreLimits& limits);

// The memory of `request` until it is scored, plus the largest possible memory of unread results,
// which are of at most `max_unread_tokens` tokens.
size_t BytesOf(const ScoreRequest& request, int64_t max_unread_tokens);

// `input` is the sequence to which `score` belongs; the caller adds its sequence_id.
v1::ScoreResponse MakeScoreResponse(const ScoreInput& input, const ScoreOptions& options,
                                    const SequenceScore& score, const v1::Fingerprint& fingerprint);

// INVALID_ARGUMENT: the in-flight mode is unknown or not possible for a scorer.
absl::StatusOr<WeightUpdate> ParseUpdateWeightsRequest(const v1::UpdateWeightsRequest& request);
v1::UpdateWeightsResponse MakeUpdateWeightsResponse(const WeightUpdateResult& result);

v1::Fingerprint FingerprintOf(const Scorer& scorer);

// Everything but the uptime.
v1::ScorerServerInfo DescribeScorer(const Scorer& scorer, const ScoreLimits& limits);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_MESSAGES_H_
