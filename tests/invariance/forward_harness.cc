// Steps a batch through prefill and decode on W rank threads. See forward_harness.h.
#include "tests/invariance/forward_harness.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "common/base/check.h"
#include "common/checkpoint/validate_tensors.h"
#include "common/parallel/thread_group.h"
#include "kernels/gather_all_reduce.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/numerics.h"
#include "kernels/model/resident_weights.h"
#include "tests/support/prepare_blocks.h"

namespace isobit::invariance {
namespace {

// One step's rows, and where each row's logits go.
struct Step {
  Batch batch;
  std::vector<std::pair<size_t, int64_t>> targets;  // (sequence, position)
};

void Must(const absl::Status& status) { ISOBIT_CHECK(status.ok()) << status.ToString(); }

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

// Memory that no position was written to must not change a bit.
void Poison(const KvCache& cache, Device& device) {
  const std::vector<Bf16> poison(cache.bytes() / sizeof(Bf16), 0xffff);
  Must(device.Copy(cache.of_block(0).planes, poison.data(), cache.bytes()));
  Must(device.Synchronize());
}

// The keys of the first layer, its values, those of the second, ...
std::vector<Bf16> ReadCache(const KvCache& cache, Device& device) {
  std::vector<Bf16> read(cache.bytes() / sizeof(Bf16));
  Must(device.Copy(read.data(), cache.of_block(0).planes, cache.bytes()));
  Must(device.Synchronize());
  return read;
}

// Pages of every sequence; a page belongs to one sequence.
std::vector<std::vector<int32_t>> AssignPages(const std::vector<Tokens>& sequences,
                                              const Schedule& schedule, int32_t& num_pages) {
  num_pages = 0;
  for (const Tokens& tokens : sequences) {
    num_pages += static_cast<int32_t>(
        (static_cast<int64_t>(tokens.size()) + schedule.page_size - 1) / schedule.page_size);
  }
  std::vector<int32_t> order(static_cast<size_t>(num_pages));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(17);
  if (schedule.scatter_pages) std::shuffle(order.begin(), order.end(), random);
  std::vector<std::vector<int32_t>> pages;
  auto next = order.begin();
  for (const Tokens& tokens : sequences) {
    const auto count =
        (static_cast<int64_t>(tokens.size()) + schedule.page_size - 1) / schedule.page_size;
    pages.emplace_back(next, next + count);
    next += count;
  }
  return pages;
}

std::vector<Step> PlanSteps(const std::vector<Tokens>& sequences, const Schedule& schedule,
                            const std::vector<std::vector<int32_t>>& pages) {
  std::vector<Step> steps;
  std::vector<int64_t> done(sequences.size(), 0);
  for (;;) {
    Step step;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const auto length = static_cast<int64_t>(sequences[s].size());
      if (done[s] == length) continue;
      const int64_t prefill = schedule.prefill > 0 ? std::min(schedule.prefill, length) : length;
      const int64_t count =
          done[s] == 0 ? prefill : std::min(schedule.decode_rows, length - done[s]);
      step.batch.sequences.push_back({.first_row = static_cast<int64_t>(step.batch.ids.size()),
                                      .num_rows = count,
                                      .first_position = done[s],
                                      .pages = pages[s].data()});
      for (int64_t i = 0; i < count; ++i, ++done[s]) {
        step.batch.ids.push_back(sequences[s][static_cast<size_t>(done[s])]);
        step.targets.emplace_back(s, done[s]);
      }
    }
    if (step.batch.ids.empty()) return steps;
    steps.push_back(std::move(step));
  }
}

}  // namespace

ForwardHarness::ForwardHarness(const std::string& model_directory) {
  auto config = LoadModelConfig(model_directory);
  ISOBIT_CHECK(config.ok()) << config.status().ToString();
  config_ = *std::move(config);
  auto checkpoint = Checkpoint::Open(model_directory);
  ISOBIT_CHECK(checkpoint.ok()) << checkpoint.status().ToString();
  checkpoint_ = std::make_unique<Checkpoint>(*std::move(checkpoint));
  const absl::Status valid = ValidateTensors(ModelPlan(config_), *checkpoint_);
  ISOBIT_CHECK(valid.ok()) << valid.ToString();
}

Tokens ForwardHarness::RandomTokens(int64_t count, uint32_t seed) const {
  std::mt19937 random(seed);
  Tokens tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens)
    token = static_cast<int32_t>(random() % static_cast<uint32_t>(config_.vocab_size));
  return tokens;
}

std::vector<SequenceLogits> ForwardHarness::Run(const std::vector<Tokens>& sequences,
                                                const Schedule& schedule) const {
  int32_t num_pages = 0;
  std::vector<std::vector<int32_t>> pages = AssignPages(sequences, schedule, num_pages);
  const std::vector<Step> steps = PlanSteps(sequences, schedule, pages);

  size_t longest = 0;
  std::vector<SequenceLogits> logits;
  const auto vocab = static_cast<size_t>(config_.vocab_size);
  for (const Tokens& tokens : sequences) {
    longest = std::max(longest, tokens.size());
    logits.emplace_back(tokens.size() * vocab, std::numeric_limits<float>::quiet_NaN());
  }
  const contract::RopeTable rope = RopeTableOf(config_, static_cast<int64_t>(longest));
  size_t most_rows = 0;
  for (const Step& step : steps) most_rows = std::max(most_rows, step.batch.ids.size());
  if (schedule.caches != nullptr) {
    schedule.caches->assign(static_cast<size_t>(schedule.tp_size), {});
  }
  ThreadGroup group(schedule.tp_size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < schedule.tp_size; ++rank) {
    ranks.emplace_back([&, rank] {
      const std::unique_ptr<Backend> ops = schedule.make_ops();
      const WeightLayout layout(config_, *ShapeOfRank(config_, rank, schedule.tp_size),
                                ops->packer());
      const auto weights = Must(ResidentWeights::Create(layout, ops->device()));
      Must(weights->Commit(Must(testing_support::PrepareBlocks(*checkpoint_, "", {weights.get()}))
                               .ranks.blocks.front()));
      const KvCache cache = Must(KvCache::Create(
          config_, layout.shape(), {.num_pages = num_pages, .page_size = schedule.page_size},
          ops->device()));
      Poison(cache, ops->device());
      Communicator& comm = group.rank(rank);
      GatherAllReduce all_reduce(*ops, comm, schedule.overlap_rows);
      Transformer transformer(layout, rope, *ops, schedule.tp_size > 1 ? &all_reduce : nullptr);
      const Memory hidden = Must(ops->device().Allocate(
          most_rows * static_cast<size_t>(config_.hidden_size) * sizeof(Bf16)));
      const Memory logits_memory = Must(ops->device().Allocate(most_rows * vocab * sizeof(float)));
      auto* const hidden_rows = reinterpret_cast<Bf16*>(hidden.get());
      auto* const logit_rows = reinterpret_cast<float*>(logits_memory.get());
      std::vector<float> step_logits(most_rows * vocab);
      const Interval columns = layout.shape().vocab;
      for (size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
        const size_t rows = step.batch.ids.size();
        Must(transformer.Forward(step.batch, *weights, cache, hidden_rows));
        Must(transformer.Logits(hidden_rows, static_cast<int64_t>(rows), *weights,
                                logit_rows + columns.begin, config_.vocab_size));
        Must(ops->device().Copy(step_logits.data(), logit_rows, rows * vocab * sizeof(float)));
        Must(ops->device().Synchronize());
        // Each rank has the columns of its ranges of the vocabulary.
        for (size_t row = 0; row < step.targets.size(); ++row) {
          const auto [sequence, position] = step.targets[row];
          std::copy_n(
              step_logits.data() + row * vocab + columns.begin, columns.size(),
              logits[sequence].data() + static_cast<size_t>(position) * vocab + columns.begin);
        }
        Must(comm.Barrier());
        if (rank == 0 && schedule.swap_first_pages && i == 0) std::swap(pages[0][0], pages[1][0]);
        Must(comm.Barrier());
      }
      if (schedule.caches != nullptr) {
        (*schedule.caches)[static_cast<size_t>(rank)] = ReadCache(cache, ops->device());
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return logits;
}

}  // namespace isobit::invariance
