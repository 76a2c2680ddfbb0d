// Shared by the scorer's tests: a receiver that collects scores, jobs of random tokens, and their
// scores by the scalar definition.
#ifndef ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_SCORING_FIXTURE_H_
#define ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_SCORING_FIXTURE_H_

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/checkpoint/model_config.h"
#include "trainer_bridge/scorer/score_job.h"
#include "trainer_bridge/scorer/scorer.h"

namespace isobit {

// Keeps all scores.
class Collector final : public ScoreReceiver {
 public:
  void OnScore(SequenceScore score) override;
  void OnDone(const absl::Status& status) override;
  bool CanTakeMore() const override;

  void SetCanTakeMore(bool can_take_more);
  // Waits, at most a minute, for the end of the job.
  absl::Status WaitUntilDone();
  // Waits, at most a minute, until `count` scores are there.
  bool WaitForScores(size_t count);
  bool done() const;
  // By index.
  std::map<size_t, SequenceScore> scores() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::map<size_t, SequenceScore> scores_;
  std::optional<absl::Status> status_;
  bool can_take_more_ = true;
};

// A job and where its scores go.
struct Submitted {
  std::shared_ptr<ScoreJob> job;
  std::shared_ptr<Collector> collector;
};
Submitted MakeJob(std::vector<ScoreInput> inputs, ScoreOptions options = {});

// `count` sequences of random ids and ragged lengths, at most `max_tokens` tokens each.
std::vector<ScoreInput> RandomInputs(const ModelConfig& config, uint64_t seed, size_t count,
                                     size_t max_tokens);

// Completions of one prompt of 70 tokens, sequences that begin alike in other ways, and a stranger.
// At most 125 tokens each.
std::vector<ScoreInput> AlikeInputs(const ModelConfig& config, uint64_t seed);

// Every sampling parameter that can change a distribution, at values that do.
ScoreOptions FullOptions();

// All floats and ids of a score as bit patterns, after the version's id.
std::vector<uint32_t> Bits(const SequenceScore& score);

// The bits of every sequence, by index.
using AllBits = std::vector<std::vector<uint32_t>>;

// Scores all inputs in one job; any error fails the test.
AllBits ScoreAll(Scorer& scorer, const std::vector<ScoreInput>& inputs,
                 const ScoreOptions& options);

// The same without the versions' ids, to compare the scores alone.
AllBits WithoutVersions(AllBits bits);

// The score of one sequence by the scalar definition: unsharded weights, one forward pass, one row
// of logits at a time.
SequenceScore ScoreByDefinition(const std::string& model_directory, const ScoreInput& input,
                                const ScoreOptions& options);

}  // namespace isobit

#endif  // ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_SCORING_FIXTURE_H_
