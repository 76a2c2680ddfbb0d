// The ranks' executors, and the jobs they do together. See model_runner.h.
#include "rollout/engine/model_runner.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/model/numerics.h"

namespace isobit {
namespace {

// A sequence's own, one to return to, one that it shares; what is free keeps prefixes.
constexpr int64_t kSlotsOfSequence = 4;
constexpr int32_t kLeastSlots = 4;  // with which one sequence can run

int32_t Bounded(int64_t number) {
  return static_cast<int32_t>(std::min<int64_t>(number, std::numeric_limits<int32_t>::max()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(const ModelPlan& plan,
                                                                 const ModelRunnerOptions& options,
                                                                 int64_t max_sequences,
                                                                 int64_t max_rows) {
  const int size = options.tensor_parallel_size;
  ISOBIT_RETURN_IF_ERROR(ShapeOfRank(plan.config, 0, size).status());
  std::unique_ptr<ModelRunner> runner(new ModelRunner(plan, options));
  for (int r = 0; r < size; ++r) {
    ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(plan.config, r, size));
    ISOBIT_ASSIGN_OR_RETURN(runner->ranks_.emplace_back(),
                            options.make_rank({.plan = runner->plan_,
                                               .shape = shape,
                                               .rope = runner->rope_,
                                               .mode = options.mode,
                                               .page_size = options.page_size,
                                               .max_sequences = max_sequences,
                                               .max_rows = max_rows,
                                               .time_steps = options.time_steps,
                                               .comm = runner->group_.rank(r)}));
  }
  ISOBIT_RETURN_IF_ERROR(runner->AllocateKvCache(options, max_sequences));
  return runner;
}

ModelRunner::ModelRunner(const ModelPlan& plan, const ModelRunnerOptions& options)
    : plan_(plan),
      rope_(RopeTableOf(plan.config, options.max_positions)),
      group_(options.tensor_parallel_size),
      threads_(static_cast<size_t>(options.tensor_parallel_size),
               [this](const absl::Status& failure) { group_.Abort(failure); }) {}

absl::Status ModelRunner::AllocateKvCache(const ModelRunnerOptions& options,
                                          int64_t max_sequences) {
  ISOBIT_ASSIGN_OR_RETURN(const RankShape shape,
                          ShapeOfRank(plan_.config, 0, options.tensor_parallel_size));
  slots_ = SlotsOf(plan_, shape);
  // More can never be in use.
  const int64_t pages = (options.max_positions / options.page_size + 1) * max_sequences;
  CacheSize size = {.num_pages = Bounded(pages), .page_size = options.page_size};
  if (slots_.bytes > 0) size.num_slots = Bounded(kSlotsOfSequence * max_sequences);
  if (options.num_pages == 0) {
    for (const auto& rank : ranks_) {
      ISOBIT_ASSIGN_OR_RETURN(size, rank->CacheThatFits(size));
    }
  } else {
    size.num_pages = options.num_pages;
  }
  if (options.num_slots > 0 && slots_.bytes > 0) size.num_slots = options.num_slots;
  if (slots_.bytes > 0 && size.num_slots < kLeastSlots) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the KV cache has room for ", size.num_slots, " states of sequences, each ",
                     slots_.bytes, " bytes on a rank; expected at least ", kLeastSlots));
  }
  cache_size_ = size;
  for (const auto& rank : ranks_) ISOBIT_RETURN_IF_ERROR(rank->AllocateKvCache(size));
  return absl::OkStatus();
}

RankMemory ModelRunner::memory() const {
  RankMemory most;
  for (const auto& rank : ranks_) {
    const RankMemory memory = rank->memory();
    if (memory.total() > most.total()) most = memory;
  }
  return most;
}

ResidentStore ModelRunner::NewStore() const {
  std::vector<ResidentWeights*> weights;
  for (const auto& rank : ranks_) weights.push_back(rank->weights());
  return ResidentStore(std::move(weights));
}

absl::Status ModelRunner::Launch(const ModelStep& step) {
  return OnEachRank([&step](RankExecutor& rank, size_t /*r*/) { return rank.Launch(step); });
}

absl::Status ModelRunner::Collect(ModelStep& step) {
  step.is_awaited = step.is_awaited && threads_.has_spare_cores();
  const auto collect = [&](size_t rank) { return ranks_[rank]->Collect(step); };
  return step.is_awaited ? threads_.Run(collect, kMostAwake) : threads_.Run(collect);
}

absl::Status ModelRunner::Serve(const PreparedRanks& prepared) {
  return OnEachRank(
      [&prepared](RankExecutor& rank, size_t r) { return rank.Serve(prepared.blocks[r]); });
}

absl::StatusOr<ProbeReport> ModelRunner::Probe(absl::Span<const int32_t> tokens,
                                               const ProbeWanted& wanted) {
  std::vector<ProbedRank*> probed;
  for (const auto& rank : ranks_) probed.push_back(rank->probed());
  if (std::ranges::find(probed, nullptr) != probed.end()) {
    return absl::UnimplementedError("this backend computes without a forward pass to probe");
  }
  const ProbePass pass(tokens, cache_size_.page_size);
  absl::Status done;
  for (ProbedRank* const rank : probed) {
    if (done.ok()) done = rank->PrepareProbe(pass);
  }
  std::vector<ForwardProbe> probes;
  const int size = static_cast<int>(ranks_.size());
  for (int r = 0; r < size; ++r) {
    ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(plan_.config, r, size));
    probes.emplace_back(plan_.config, shape, wanted);
  }
  if (done.ok()) {
    done = threads_.Run([&](size_t r) { return probed[r]->RunProbe(pass, probes[r]); });
  }
  for (ProbedRank* const rank : probed) rank->DropProbe();
  ISOBIT_RETURN_IF_ERROR(done);
  return ForwardProbe::Merge(probes);
}

absl::StatusOr<size_t> ModelRunner::Release(bool weights) {
  size_t released = 0;
  for (const auto& rank : ranks_) {
    const RankMemory before = rank->memory();
    if (KvCache* const cache = rank->kv_cache()) ISOBIT_RETURN_IF_ERROR(cache->Release());
    ResidentWeights* const resident = rank->weights();
    if (weights && resident != nullptr) ISOBIT_RETURN_IF_ERROR(resident->ReleaseMemory());
    released += before.total() - rank->memory().total();
  }
  return released;
}

absl::Status ModelRunner::RestoreKvCache() {
  for (const auto& rank : ranks_) {
    KvCache* const cache = rank->kv_cache();
    const absl::Status restored = cache != nullptr ? cache->Restore() : absl::OkStatus();
    if (restored.ok()) continue;
    for (const auto& other : ranks_) {
      if (other->kv_cache() != nullptr) ISOBIT_RETURN_IF_ERROR(other->kv_cache()->Release());
    }
    return restored;
  }
  return absl::OkStatus();
}

bool ModelRunner::has_weights() const {
  return std::ranges::all_of(ranks_, [](const std::unique_ptr<RankExecutor>& rank) {
    return rank->weights() == nullptr || rank->weights()->loaded();
  });
}

absl::Status ModelRunner::OnEachRank(
    absl::FunctionRef<absl::Status(RankExecutor& executor, size_t rank)> job) {
  return threads_.Run([&](size_t rank) { return job(*ranks_[rank], rank); });
}

}  // namespace isobit
