// Runs steps on a ModelRunner without an engine.
#include "tests/rollout/engine/step_rows.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "common/base/check.h"
#include "kernels/model/prepare_weights.h"
#include "rollout/engine/step_planner.h"
#include "tests/support/bitwise.h"

namespace isobit {
namespace {

using testing_support::BitwiseEqual;
using Tokens = std::vector<int32_t>;

constexpr int32_t kPagesOfSequence = 16;
constexpr int64_t kMostRows = 256;

void Must(const absl::Status& status) { ISOBIT_CHECK(status.ok()) << status.ToString(); }

// One of the sequences, as far as it has come.
struct Runner {
  const Tokens& tokens;
  Tokens pages;
  int64_t num_cached;
  PlannedRequests planned{};
  int64_t rows = 0;  // of the step, without wrong guesses
};

bool IsScored(int64_t position) { return position % 3 == 2; }

// The row of token `position - 1`: what is asked about the token at `position`.
void Ask(const Tokens& tokens, int64_t position, LogProbRequest& request) {
  if (IsScored(position)) request.target = tokens[static_cast<size_t>(position)];
  request.sampling.temperature = position % 2 == 0 ? 0.7f : 1.0f;
  request.sampling.top_k = position % 5 == 0 ? 7 : 0;
  request.sampling.seed = 5;
  request.sampling.position = static_cast<uint32_t>(position);
  request.top_logprobs = 3;
  request.want_entropy = true;
}

// Adds the next rows of the sequence to the step: all that is drawn after them is known but for the
// wrong guesses, which are other tokens.
void Plan(const RowsRun& run, Runner& s, ModelStep& step) {
  const auto left = static_cast<int64_t>(s.tokens.size()) - 1 - s.num_cached;
  s.rows = std::min(run.rows_of_step, left);
  if (s.rows == 0) return;
  const auto begin = s.tokens.begin() + s.num_cached + 1;
  Tokens guesses(begin, begin + s.rows - 1);
  for (int32_t g = 0; g < run.wrong_guesses; ++g) {
    guesses.push_back((s.tokens[static_cast<size_t>(s.num_cached + s.rows)] + 1 + g) % 50);
  }
  s.planned = PlanSequence(
      {.tokens = absl::MakeSpan(s.tokens).subspan(0, static_cast<size_t>(s.num_cached) + 1),
       .num_cached = s.num_cached,
       .guesses = guesses},
      s.pages.data(), step);
  for (int64_t i = 0; i < s.rows; ++i) {
    Ask(s.tokens, s.num_cached + i + 1,
        step.requests[s.planned.first_draw + static_cast<size_t>(i)]);
  }
}

// With as many in flight as there may be.
void RunInTurn(ModelRunner& runner, const std::vector<ModelStep*>& steps) {
  const auto depth = static_cast<size_t>(runner.depth());
  for (size_t i = 0; i < steps.size() + depth; ++i) {
    if (i >= depth) Must(runner.Collect(*steps[i - depth]));
    if (i < steps.size()) Must(runner.Launch(*steps[i]));
  }
}

}  // namespace

std::vector<Tokens> TokensForRows(const ModelConfig& config) {
  std::mt19937 random(3);
  std::vector<Tokens> sequences;
  for (const int64_t rows : {24, 19, 17}) {
    Tokens& tokens = sequences.emplace_back(static_cast<size_t>(kContextOfRows + rows));
    for (int32_t& token : tokens) {
      token = static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size));
    }
  }
  return sequences;
}

ResultsOfRows RunRows(const ModelConfig& config, const std::string& root, const std::string& model,
                      const ModelRunnerOptions& options, const RowsRun& run) {
  auto runner = ModelRunner::Create(config, options, /*max_sequences=*/64, kMostRows);
  Must(runner.status());
  const auto serve = [&](const std::string& served) {
    ResidentStore store = (*runner)->NewStore();
    Must(PrepareWeights({root}, {.model_path = served}, config, store).status());
    Must((*runner)->Serve(store.Take()));
  };
  if (!run.replaced.empty()) serve(run.replaced);
  if (run.sleeps) {
    Must((*runner)->Release(/*weights=*/true).status());
    Must((*runner)->RestoreKvCache());
  }
  serve(model);

  const std::vector<Tokens> sequences = TokensForRows(config);
  std::vector<Runner> runners;
  ResultsOfRows results(sequences.size());
  if (run.fast != nullptr) run.fast->assign(sequences.size(), {});
  ModelStep step;
  ModelStep fast;
  // One more sequence enters at each step: prompts and single rows beside several rows.
  for (size_t number = 0;; ++number) {
    for (Runner& s : runners) Plan(run, s, step);
    if (number < sequences.size()) {
      Tokens pages(kPagesOfSequence);
      std::iota(pages.begin(), pages.end(), static_cast<int32_t>(number) * kPagesOfSequence);
      std::reverse(pages.begin(), pages.end());
      runners.push_back({sequences[number], std::move(pages), kContextOfRows});
      Tokens context(sequences[number].begin(), sequences[number].begin() + kContextOfRows);
      if (run.wrong_context) context.back() = (context.back() + 1) % config.vocab_size;
      PlanSequence({.tokens = absl::MakeSpan(context)}, runners.back().pages.data(), step);
    }
    if (step.batch.ids.empty()) return results;
    step.results.assign(step.requests.size(), {});
    std::vector<ModelStep*> passes = {&step};
    if (run.fast != nullptr) {
      fast = step;
      fast.variant = true;
      passes.insert(run.fast_last ? passes.end() : passes.begin(), &fast);
    }
    RunInTurn(**runner, passes);
    for (size_t s = 0; s < runners.size(); ++s) {
      if (runners[s].rows == 0) continue;
      const auto keep = [&](const ModelStep& of, ResultsOfRows& to) {
        const auto first = of.results.begin() + static_cast<int64_t>(runners[s].planned.first_draw);
        to[s].insert(to[s].end(), first, first + runners[s].rows);
      };
      keep(step, results);
      if (run.fast != nullptr) keep(fast, *run.fast);
      runners[s].num_cached += runners[s].rows;
    }
    ClearStep(step);
  }
}

double ShareOfSameDraws(const ResultsOfRows& a, const ResultsOfRows& b) {
  int64_t draws = 0;
  int64_t same = 0;
  for (size_t s = 0; s < a.size(); ++s) {
    for (size_t i = 0; i < a[s].size(); ++i) {
      if (IsScored(kContextOfRows + 1 + static_cast<int64_t>(i))) continue;
      ++draws;
      same += a[s][i].token.id == b[s][i].token.id ? 1 : 0;
    }
  }
  return static_cast<double>(same) / static_cast<double>(draws);
}

bool SameResults(const ResultsOfRows& a, const ResultsOfRows& b) {
  const auto same_token = [](const TokenLogProb& x, const TokenLogProb& y) {
    return x.id == y.id && BitwiseEqual(x.logprob, y.logprob);
  };
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [&](const auto& of_a, const auto& of_b) {
        return std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                          [&](const LogProbResult& x, const LogProbResult& y) {
                            return x.finite && y.finite && same_token(x.token, y.token) &&
                                   BitwiseEqual(x.entropy, y.entropy) &&
                                   std::equal(x.top.begin(), x.top.end(), y.top.begin(),
                                              y.top.end(), same_token);
                          });
      });
}

}  // namespace isobit
