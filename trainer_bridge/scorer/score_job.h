// One request inside the scoring engine: what to score, how, and where the results go.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_JOB_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_JOB_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/opened_model.h"
#include "common/config/sampling_params.h"
#include "kernels/ops/log_probs.h"

namespace isobit {

struct ScoreInput {
  std::vector<int32_t> prompt;      // at least one id
  std::vector<int32_t> completion;  // may be empty

  int64_t num_tokens() const { return static_cast<int64_t>(prompt.size() + completion.size()); }
};

struct ScoreOptions {
  SamplingParams sampling{};  // valid; seed, n and max_tokens are not used
  bool raw = false;           // the model's own distribution, not the sampler's
  bool prompt_logprobs = false;
  bool entropy = false;
  std::optional<uint64_t> weight_version{};  // refuse all other weights
};

// Scores of consecutive tokens.
struct TokenScores {
  std::vector<float> logprobs;    // [tokens]
  std::vector<float> entropies;   // [tokens], nats; empty unless asked for
  std::vector<TokenLogProb> top;  // [tokens, sampling.logprobs]; unused entries have id -1
};

struct SequenceScore {
  size_t index = 0;        // in ScoreJob::inputs()
  TokenScores completion;  // one entry for each completion token
  TokenScores prompt;      // all prompt tokens but the first, if asked for; without entropies
  WeightVersion version;
};

// Receives results. The job makes one call at a time, from any thread. No call may block.
class ScoreReceiver {
 public:
  virtual ~ScoreReceiver() = default;
  virtual void OnScore(SequenceScore score) = 0;
  // The last call. OK: all sequences were scored.
  virtual void OnDone(const absl::Status& status) = 0;
  // False while a slow reader has too many unread results; the job's other sequences then wait.
  // Called from any thread, at any time.
  virtual bool CanTakeMore() const = 0;
};

// Thread safe.
class ScoreJob {
 public:
  // `inputs` is not empty. first_place: the index of inputs[0] in the client's request.
  ScoreJob(std::vector<ScoreInput> inputs, ScoreOptions options,
           std::shared_ptr<ScoreReceiver> receiver, size_t first_place = 0);

  const std::vector<ScoreInput>& inputs() const { return inputs_; }
  const ScoreOptions& options() const { return options_; }
  const ScoreReceiver& receiver() const { return *receiver_; }
  // The client's name for inputs()[index], for errors.
  std::string NameOf(size_t index) const;

  // Passes a sequence's score to the receiver; the last one ends the job. Has no effect after the
  // end.
  void Deliver(SequenceScore score);
  // Ends the job early. False: the job had already ended.
  bool End(const absl::Status& status);
  bool ended() const;
  // The number of sequences whose scores are still to be delivered.
  size_t num_pending() const;

 private:
  const std::vector<ScoreInput> inputs_;
  const ScoreOptions options_;
  const std::shared_ptr<ScoreReceiver> receiver_;
  const size_t first_place_;

  mutable std::mutex mutex_;
  size_t pending_;  // 0: ended
};

// One sequence of a job.
struct ScoreItem {
  std::shared_ptr<ScoreJob> job;
  size_t index = 0;  // in job->inputs()

  const ScoreInput& input() const { return job->inputs()[index]; }
  // The first scored position; all later ones are scored, too.
  int64_t first_scored() const {
    return job->options().prompt_logprobs ? 1 : static_cast<int64_t>(input().prompt.size());
  }
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_JOB_H_
