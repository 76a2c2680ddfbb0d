// What guesses gain and cost by the times of GpuStepCosts: an engine over a rank that computes
// nothing and whose clock these times drive. How good they are, GPUs tell
// (docs/benchmarks/speculation.md); here is what the engine makes of them.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "rollout/guesses/drafters.h"
#include "rollout/guesses/guess_table.h"
#include "rollout/guesses/speculation.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

constexpr double kBytesOf8B = 16.4e9;

// The token that a sample draws, whatever is computed beside it.
int32_t TokenAt(const RowSampling& row, int32_t vocab_size) {
  uint64_t hash = row.seed * 0x9e3779b97f4a7c15u + row.sample;
  hash = (hash ^ row.position) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ hash >> 31) * 0x94d049bb133111ebu;
  return static_cast<int32_t>((hash >> 33) % static_cast<uint64_t>(vocab_size));
}

class ClockedRank final : public RankExecutor {
 public:
  ClockedRank(const StepCosts& costs, int32_t vocab_size, double& clock)
      : costs_(costs), table_(costs, 1, 1), vocab_size_(vocab_size), clock_(clock) {}

  std::string backend() const override { return "clocked"; }
  int depth() const override { return 2; }
  absl::StatusOr<CacheSize> CacheThatFits(const CacheSize& most) const override {
    return CacheSize{.num_pages = 1 << 20, .page_size = most.page_size};
  }
  absl::Status AllocateKvCache(const CacheSize& /*size*/) override { return absl::OkStatus(); }

  absl::Status Launch(const ModelStep& step) override {
    const auto sequences = static_cast<double>(step.batch.sequences.size());
    const auto rows = static_cast<double>(step.batch.ids.size());
    clock_ += table_.TimeOfStep(sequences, rows - sequences);
    if (num_in_flight_++ > 0) clock_ -= costs_.alone + sequences * costs_.alone_of_sequence;
    return absl::OkStatus();
  }

  absl::Status Collect(ModelStep& step) override {
    --num_in_flight_;
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const int32_t id = TokenAt(step.requests[i].sampling, vocab_size_);
      step.results[i].token = {.id = id, .logprob = -1.0f};
    }
    return absl::OkStatus();
  }

  RankMemory memory() const override { return {}; }
  bool has_variant() const override { return false; }
  ProbedRank* probed() override { return nullptr; }
  ResidentWeights* weights() override { return nullptr; }
  KvCache* kv_cache() override { return nullptr; }
  absl::Status Serve(const PreparedBlocks& /*prepared*/) override { return absl::OkStatus(); }

 private:
  const StepCosts costs_;
  const GuessTable table_;
  const int32_t vocab_size_;
  double& clock_;
  int num_in_flight_ = 0;
};

// With the number of ranks as the parameter.
class SpeculationCostTest : public EngineFixture, public testing::WithParamInterface<int> {
 protected:
  // The drafts that come along with a request which draws these tokens.
  using Drafts = std::vector<int32_t> (*)(std::vector<int32_t> tokens, int32_t vocab_size);

  SpeculationCostTest() {
    const StepCosts costs = GpuStepCosts(kBytesOf8B / GetParam(), GetParam());
    EngineOptions options = DefaultOptions();
    options.runner.tensor_parallel_size = 1;
    options.runner.num_pages = 1 << 15;
    options.runner.make_rank = [this, costs](const RankOptions& /*rank*/) {
      return std::make_unique<ClockedRank>(costs, config_.vocab_size, clock_);
    };
    options.scheduler = {.max_running = 512, .max_batch_tokens = 4096};
    options.make_guesser = Speculation::Maker(
        {.make_drafters = *DraftersOf("history,lookup", {.history_bytes = 64 << 20}),
         .costs = costs});
    engine_ = MakeEngine(options);
  }

  // How many times as fast a client's batch is with these drafts, of prompts that were seen once. A
  // request comes every `gap` microseconds.
  double Gain(const std::string& client, size_t batch, Drafts drafts, double gap) {
    ++num_rounds_;
    std::vector<GenerationRequest> requests;
    for (size_t i = 0; i < batch; ++i) {
      const uint64_t seed = num_rounds_ * 1000 + i;
      requests.push_back(MakeRequest(absl::StrCat(seed), seed));
      const auto id = [](uint64_t number) { return static_cast<int32_t>(number % 64); };
      requests.back().prompt = {id(num_rounds_), id(num_rounds_ / 64), id(i), id(i / 64), 2};
      requests.back().sampling.max_tokens = 1;
      requests.back().speculate = false;
      requests.back().client = client;
    }
    Draw(requests, 0);
    for (GenerationRequest& request : requests) request.sampling.max_tokens = 128;
    const double start = clock_;
    const std::vector<std::vector<int32_t>> drawn = Draw(requests, gap);
    const double plain = clock_ - start;
    for (size_t i = 0; i < batch; ++i) {
      requests[i].draft_tokens = drafts(drawn[i], config_.vocab_size);
      requests[i].speculate = true;
    }
    EXPECT_EQ(Draw(requests, gap), drawn);
    return plain / (clock_ - start - plain);
  }

 private:
  // What the requests draw.
  std::vector<std::vector<int32_t>> Draw(const std::vector<GenerationRequest>& requests,
                                         double gap) {
    const double start = clock_;
    std::vector<std::shared_ptr<RecordingSink>> results;
    while (results.size() < requests.size()) {
      const double next = start + gap * static_cast<double>(results.size());
      if (clock_ >= next) {
        results.push_back(Submit(*engine_, requests[results.size()]));
      } else if (!engine_->Step()) {
        clock_ = next;
      }
    }
    Run(*engine_);
    std::vector<std::vector<int32_t>> drawn;
    for (const auto& result : results) drawn.push_back(result->samples[0].tokens);
    return drawn;
  }

  double clock_ = 0.0;  // us
  uint64_t num_rounds_ = 0;
  std::unique_ptr<Engine> engine_;
};

std::vector<int32_t> Same(std::vector<int32_t> tokens, int32_t /*vocab_size*/) { return tokens; }

std::vector<int32_t> AllWrong(std::vector<int32_t> tokens, int32_t vocab_size) {
  for (int32_t& token : tokens) token = (token + 1) % vocab_size;
  return tokens;
}

// Three right ones, one wrong, and so on: who follows them is always misled.
std::vector<int32_t> Misleading(std::vector<int32_t> tokens, int32_t vocab_size) {
  for (size_t i = 3; i < tokens.size(); i += 4) tokens[i] = (tokens[i] + 1) % vocab_size;
  return tokens;
}

#ifdef ISOBIT_SANITIZED
constexpr size_t kBatches[] = {1, 8, 32};
#else
constexpr size_t kBatches[] = {1, 8, 64, 256, 512};
#endif
constexpr double kGaps[] = {0, 300, 600};

TEST_P(SpeculationCostTest, DraftsThatHoldPay) {
  for (const double gap : kGaps) {
    EXPECT_GE(Gain("a", 1, Same, gap), 5.5) << gap;
    EXPECT_GE(Gain("b", 8, Same, gap), 4.5) << gap;
    EXPECT_GE(Gain("c", 64, Same, gap), 2.2) << gap;
#ifndef ISOBIT_SANITIZED
    EXPECT_GE(Gain("d", 256, Same, gap), 1.4) << gap;
#endif
  }
}

// Of a client of whom nothing is known, and then of one who is known.
TEST_P(SpeculationCostTest, NoDraftsCostMoreThanTwoPercent) {
  for (const size_t batch : kBatches) {
    for (const double gap : kGaps) {
      const std::string load = absl::StrCat(batch, " requests every ", gap, " us");
      for (int round = 0; round < 2; ++round) {
        EXPECT_GE(Gain(absl::StrCat("misled ", load), batch, Misleading, gap), 0.98) << load;
        EXPECT_GE(Gain(absl::StrCat("wrong ", load), batch, AllWrong, gap), 0.99) << load;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, SpeculationCostTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace isobit
