// Field by field, and the comparison of two identities.
#include "trainer_bridge/scorer/group_messages.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"
#include "common/rpc/sampling_params_proto.h"

namespace isobit {
namespace {

template <class T>
absl::Status CheckSame(const char* what, const T& expected, const T& actual) {
  if (expected == actual) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, ": the leader has ", expected, ", the member ", actual));
}

v1::ScoredTokens MakeTokens(const TokenScores& scores) {
  v1::ScoredTokens tokens;
  tokens.mutable_logprobs()->Add(scores.logprobs.begin(), scores.logprobs.end());
  tokens.mutable_entropies()->Add(scores.entropies.begin(), scores.entropies.end());
  for (const TokenLogProb& top : scores.top) {
    tokens.add_top_ids(top.id);
    tokens.add_top_logprobs(top.logprob);
  }
  return tokens;
}

TokenScores TokensOf(const v1::ScoredTokens& tokens) {
  TokenScores scores;
  scores.logprobs.assign(tokens.logprobs().begin(), tokens.logprobs().end());
  scores.entropies.assign(tokens.entropies().begin(), tokens.entropies().end());
  const int count = std::min(tokens.top_ids_size(), tokens.top_logprobs_size());
  for (int i = 0; i < count; ++i) {
    scores.top.push_back({tokens.top_ids(i), tokens.top_logprobs(i)});
  }
  return scores;
}

}  // namespace

v1::GroupIdentity MakeGroupIdentity(const GroupIdentity& identity, int world_size,
                                    int local_ranks) {
  v1::GroupIdentity message;
  message.set_fingerprint(identity.fingerprint);
  message.set_settings(identity.settings);
  message.set_max_context(identity.max_context);
  message.set_prefix_sharing(identity.prefix_sharing);
  message.set_world_size(world_size);
  message.set_local_ranks(local_ranks);
  message.set_version(ISOBIT_VERSION);
  return message;
}

absl::Status CheckSameGroup(const v1::GroupIdentity& expected, const v1::GroupIdentity& actual) {
  ISOBIT_RETURN_IF_ERROR(CheckSame("version", expected.version(), actual.version()));
  ISOBIT_RETURN_IF_ERROR(CheckSame("world size", expected.world_size(), actual.world_size()));
  ISOBIT_RETURN_IF_ERROR(
      CheckSame("shards of a process", expected.local_ranks(), actual.local_ranks()));
  ISOBIT_RETURN_IF_ERROR(
      CheckSame("fingerprint of the numerics", expected.fingerprint(), actual.fingerprint()));
  ISOBIT_RETURN_IF_ERROR(CheckSame("model settings", expected.settings(), actual.settings()));
  ISOBIT_RETURN_IF_ERROR(CheckSame("max_context", expected.max_context(), actual.max_context()));
  return CheckSame("prefix_sharing", expected.prefix_sharing(), actual.prefix_sharing());
}

v1::Outcome MakeOutcome(const absl::Status& status) {
  v1::Outcome outcome;
  outcome.set_code(static_cast<int32_t>(status.code()));
  outcome.set_message(absl::StrCat(status.message()));
  return outcome;
}

absl::Status StatusOf(const v1::Outcome& outcome) {
  return absl::Status(static_cast<absl::StatusCode>(outcome.code()), outcome.message());
}

v1::WorkItem MakeWorkItem(const ScoreItem& item) {
  v1::WorkItem message;
  const ScoreInput& input = item.input();
  const ScoreOptions& options = item.job->options();
  message.mutable_prompt()->Add(input.prompt.begin(), input.prompt.end());
  message.mutable_completion()->Add(input.completion.begin(), input.completion.end());
  *message.mutable_sampling() = SamplingParamsToProto(options.sampling);
  message.set_raw(options.raw);
  message.set_prompt_logprobs(options.prompt_logprobs);
  message.set_entropy(options.entropy);
  message.set_index(item.index);
  return message;
}

ScoreInput InputOf(const v1::WorkItem& item) {
  return {.prompt = TokenIdsFromWire(item.prompt()),
          .completion = TokenIdsFromWire(item.completion())};
}

ScoreOptions OptionsOf(const v1::WorkItem& item) {
  return {.sampling = SamplingParamsFromProto(item.sampling()),
          .raw = item.raw(),
          .prompt_logprobs = item.prompt_logprobs(),
          .entropy = item.entropy()};
}

v1::SequenceScored MakeScored(const SequenceScore& score) {
  v1::SequenceScored scored;
  *scored.mutable_completion() = MakeTokens(score.completion);
  *scored.mutable_prompt() = MakeTokens(score.prompt);
  return scored;
}

SequenceScore ScoreOf(const v1::SequenceScored& scored) {
  SequenceScore score;
  score.completion = TokensOf(scored.completion());
  score.prompt = TokensOf(scored.prompt());
  return score;
}

}  // namespace isobit
