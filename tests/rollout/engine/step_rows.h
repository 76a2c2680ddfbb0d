// Runs known tokens through the ranks, one or several rows of a sequence in a step, and returns
// what every row gave; if wanted, on the fast path, too.
#ifndef ISOBIT_TESTS_ROLLOUT_ENGINE_STEP_ROWS_H_
#define ISOBIT_TESTS_ROLLOUT_ENGINE_STEP_ROWS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/checkpoint/model_config.h"
#include "rollout/engine/model_runner.h"

namespace isobit {

// How the sequences of TokensForRows are run.
struct RowsRun {
  int64_t rows_of_step = 1;    // of each sequence, once its context is cached
  int32_t wrong_guesses = 0;   // tokens that each step computes beyond its own, and that are wrong
  bool wrong_context = false;  // a control: another token ends each context
  // Not null: the fast path computes each step, too, right before it is computed as ever, and
  // leaves its results here.
  std::vector<std::vector<LogProbResult>>* fast = nullptr;
  bool fast_last = false;     // a control: right after it, so that later steps read its keys
  std::string replaced = "";  // a model directory that is served before; empty: none
  bool sleeps = false;        // the ranks give all memory back and take it again before all steps
};

inline constexpr int64_t kContextOfRows = 13;  // tokens of a sequence before the first such step

// Three sequences of kContextOfRows + 24, + 19 and + 17 tokens.
std::vector<std::vector<int32_t>> TokensForRows(const ModelConfig& config);

// [sequences][tokens after the context, less one]: a draw, or for every third token the score of
// the next one, with top logprobs and entropy. A failure stops the test program.
using ResultsOfRows = std::vector<std::vector<LogProbResult>>;

// Serves the model directory below `root`, and runs the sequences in pages of their own, side by
// side, each a step later than the one before. `options`: at least 64 pages of 4 tokens, and 64
// positions.
ResultsOfRows RunRows(const ModelConfig& config, const std::string& root, const std::string& model,
                      const ModelRunnerOptions& options, const RowsRun& run);

// The share of the draws that are the same tokens.
double ShareOfSameDraws(const ResultsOfRows& a, const ResultsOfRows& b);

// Bit for bit.
bool SameResults(const ResultsOfRows& a, const ResultsOfRows& b);

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_ENGINE_STEP_ROWS_H_
