// The engine's loop, its batches and its weight switch. See scorer.h.
#include "trainer_bridge/scorer/scorer.h"

#include <algorithm>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"
#include "kernels/model/numerics.h"
#include "kernels/model/pack_model.h"
#include "kernels/model/prepare_weights.h"
#include "trainer_bridge/scorer/packing.h"
#include "trainer_bridge/scorer/page_numbers.h"

namespace isobit {
namespace {

constexpr std::chrono::seconds kLogInterval(10);

// Of a probe, whose results the host sums up while other ranks wait for its part in their gathers.
constexpr int64_t kMaxProbeTokens = 16384;

using Clock = std::chrono::steady_clock;

std::chrono::microseconds Since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
}

absl::Status Stopping() { return absl::UnavailableError("the scorer is stopping"); }

absl::Status CheckOptions(const ScorerOptions& options, const ModelConfig& config) {
  if (options.num_shards < 1 || options.num_shards > kMaxShards) {
    return absl::InvalidArgumentError(
        absl::StrCat("shards: expected 1 to ", kMaxShards, ", got ", options.num_shards));
  }
  if (options.max_context < 0 || options.max_context > config.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_context: expected at most the model's max_position_embeddings, ",
                     config.max_position_embeddings, ", got ", options.max_context));
  }
  if (options.max_batch_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_batch_tokens: expected 1 or more, got ", options.max_batch_tokens));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Scorer>> Scorer::Load(ScorerOptions options,
                                                     const std::string& model_path) {
  ISOBIT_ASSIGN_OR_RETURN(
      const OpenedModel model,
      OpenModelAs(options.load_format, options.model_root, model_path, options.load_policy));
  ISOBIT_RETURN_IF_ERROR(CheckOptions(options, model.config));
  if (options.max_context == 0) options.max_context = model.config.max_position_embeddings;
  if (options.local_shards == 0) options.local_shards = options.num_shards;
  std::shared_ptr<RemoteRanks> remote;
  if (options.local_shards < options.num_shards) {
    ISOBIT_ASSIGN_OR_RETURN(
        remote, options.assemble({.fingerprint = FingerprintOf(model.config, options.numerics),
                                  .settings = model.config.Settings(),
                                  .max_context = options.max_context,
                                  .prefix_sharing = options.prefix_sharing}));
  }
  absl::StatusOr<std::unique_ptr<Scorer>> scorer = Start(std::move(options), model, remote);
  if (!scorer.ok() && remote != nullptr) remote->Abort(scorer.status());
  return scorer;
}

absl::StatusOr<std::unique_ptr<Scorer>> Scorer::Start(ScorerOptions options,
                                                      const OpenedModel& model,
                                                      std::shared_ptr<RemoteRanks> remote) {
  ISOBIT_ASSIGN_OR_RETURN(
      std::unique_ptr<ShardRanks> ranks,
      ShardRanks::Create(model.config, {.num_shards = options.num_shards,
                                        .first_rank = 0,
                                        .num_ranks = options.local_shards,
                                        .max_context = options.max_context,
                                        .max_batch_tokens = options.max_batch_tokens,
                                        .chunk_rows = options.chunk_rows,
                                        .prefix_sharing = options.prefix_sharing,
                                        .backend = options.backend}));
  ISOBIT_ASSIGN_OR_RETURN(auto weights, ranks->Cut(1, [&](WeightStore& store) {
    return PackModel(*model.weights, "", store, options.load_policy.allow_nonfinite);
  }));
  if (remote != nullptr) {
    ISOBIT_RETURN_IF_ERROR(remote->WaitUntilReady());
    ISOBIT_RETURN_IF_ERROR(remote->CheckDigest(weights->version.digest));
  }
  return std::unique_ptr<Scorer>(
      new Scorer(std::move(options), std::move(ranks), std::move(remote), std::move(weights)));
}

Scorer::Scorer(ScorerOptions options, std::unique_ptr<ShardRanks> ranks,
               std::shared_ptr<RemoteRanks> remote, std::shared_ptr<const ShardedVersion> weights)
    : options_(std::move(options)),
      ranks_(std::move(ranks)),
      remote_(std::move(remote)),
      weights_(std::move(weights)) {
  engine_ = std::thread([this] { Run(); });
}

Scorer::~Scorer() {
  Stop();
  engine_.join();
}

void Scorer::Stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  // The running batch stops at its next block.
  EndAllJobs(Stopping());
  changed_.notify_all();
}

void Scorer::EndAllJobs(const absl::Status& status) {
  for (const Queued& queued : jobs_) queued.job->End(status);
  for (const std::shared_ptr<ScoreJob>& job : held_) job->End(status);
}

absl::Status Scorer::Submit(std::shared_ptr<ScoreJob> job) {
  const std::lock_guard lock(mutex_);
  ISOBIT_RETURN_IF_ERROR(CheckRunning());
  DropEndedJobs();
  size_t queued = job->inputs().size();
  for (const Queued& other : jobs_) queued += other.job->num_pending();
  for (const std::shared_ptr<ScoreJob>& other : held_) queued += other->num_pending();
  if (queued > options_.max_queued_sequences) {
    return absl::ResourceExhaustedError(
        absl::StrCat("queue: ", queued, " sequences with this request, expected at most ",
                     options_.max_queued_sequences));
  }
  if (switch_.is_waiting()) {
    held_.push_back(std::move(job));
    return absl::OkStatus();
  }
  ISOBIT_RETURN_IF_ERROR(CheckVersion(*job));
  jobs_.push_back({std::move(job)});
  changed_.notify_all();
  return absl::OkStatus();
}

void Scorer::Wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Scorer::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] {
      DropEndedJobs();
      return stopping_ || !fault_.ok() || (HasWork() && !probing_);
    });
    if (stopping_ || !fault_.ok()) return;
    const Pass pass = TakeBatch();
    const std::shared_ptr<const ShardedVersion> weights = weights_;
    running_ = true;
    lock.unlock();
    const Clock::time_point start = Clock::now();
    const absl::Status status = ScoreBatch(*weights, pass);
    const std::chrono::microseconds time = Since(start);
    if (!status.ok()) Fault(status);
    lock.lock();
    if (status.ok()) Account(pass, time);
    running_ = false;
    DropEndedJobs();
    changed_.notify_all();
  }
}

absl::StatusOr<ProbeResult> Scorer::Probe(absl::Span<const int32_t> tokens,
                                          const ProbeWanted& wanted) {
  const int64_t most = std::min(options_.max_context, kMaxProbeTokens);
  if (tokens.empty() || static_cast<int64_t>(tokens.size()) > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_ids: ", tokens.size(), " entries, expected 1 to ", most));
  }
  ISOBIT_RETURN_IF_ERROR(CheckTokenIds("token_ids", tokens, config().vocab_size));
  std::unique_lock lock(mutex_);
  // The ranks make one pass at a time: no batch starts while this waits or runs.
  changed_.wait(lock, [&] { return (!running_ && !probing_) || !CheckRunning().ok(); });
  ISOBIT_RETURN_IF_ERROR(CheckRunning());
  probing_ = true;
  const std::shared_ptr<const ShardedVersion> weights = weights_;
  lock.unlock();
  // Before any rank takes part in the pass: without memory nothing has happened.
  const absl::Status prepared = ranks_->PrepareProbe(static_cast<int64_t>(tokens.size()));
  absl::StatusOr<ProbeReport> report =
      prepared.ok() ? ProbeRanks(*weights, tokens, wanted) : prepared;
  if (prepared.ok() && !report.ok()) Fault(report.status());
  lock.lock();
  probing_ = false;
  changed_.notify_all();
  if (!report.ok()) return report.status();
  return ProbeResult{*std::move(report), weights->version};
}

absl::StatusOr<ProbeReport> Scorer::ProbeRanks(const ShardedVersion& weights,
                                               absl::Span<const int32_t> tokens,
                                               const ProbeWanted& wanted) {
  absl::StatusOr<ProbeReport> report = absl::InternalError("no rank has computed");
  const absl::Status done = OnAllRanks(
      weights, std::vector<std::vector<ScoreItem>>(static_cast<size_t>(options_.num_shards)),
      [&](absl::Span<const std::vector<ScoreItem>> /*none*/) {
        report = ranks_->Probe(weights, tokens, wanted);
        return report.status();
      });
  ISOBIT_RETURN_IF_ERROR(done);
  return report;
}

void Scorer::DropEndedJobs() {
  jobs_.erase(std::remove_if(jobs_.begin(), jobs_.end(),
                             [](const Queued& queued) { return queued.job->ended(); }),
              jobs_.end());
  held_.erase(
      std::remove_if(held_.begin(), held_.end(), [](const auto& job) { return job->ended(); }),
      held_.end());
}

absl::Status Scorer::CheckRunning() const {
  if (!fault_.ok()) return absl::UnavailableError(fault_.message());  // retry on another scorer
  return stopping_ ? Stopping() : absl::OkStatus();
}

absl::Status Scorer::CheckVersion(const ScoreJob& job) const {
  const std::optional<uint64_t>& wanted = job.options().weight_version;
  if (!wanted || *wanted == weights_->version.id) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("weight_version: asked for ", *wanted, ", serving ", weights_->version.id));
}

bool Scorer::HasWork() const {
  return std::any_of(jobs_.begin(), jobs_.end(), [](const Queued& queued) {
    return queued.next < queued.job->inputs().size() && queued.job->receiver().CanTakeMore();
  });
}

Scorer::Pass Scorer::TakeBatch() {
  // A little more than can fit, so that packing, not this loop, makes the choice.
  const int64_t enough = options_.max_batch_tokens * options_.num_shards + options_.max_context;
  PageNumbers numbers(options_.prefix_sharing);
  std::vector<Queued*> owners;
  std::vector<ScoreItem> candidates;
  std::vector<WaitingSequence> waiting;
  int64_t rows = 0;  // if one rank computed all
  int64_t scored = 0;
  for (Queued& queued : jobs_) {
    if (!queued.job->receiver().CanTakeMore()) continue;
    const size_t num_inputs = queued.job->inputs().size();
    for (size_t i = queued.next; i < num_inputs && rows < enough && scored < enough; ++i) {
      const ScoreItem& item = candidates.emplace_back(ScoreItem{queued.job, i});
      const int64_t tokens = item.input().num_tokens();
      const int32_t num_known = numbers.count();
      WaitingSequence& sequence = waiting.emplace_back(
          WaitingSequence{.tokens = tokens,
                          .scored = std::max<int64_t>(1, tokens - item.first_scored()),
                          .pages = numbers.Add(item.input())});
      const auto num_new = static_cast<size_t>(numbers.count() - num_known);
      rows += tokens - static_cast<int64_t>(sequence.pages.size() - num_new) * kScorePageSize;
      scored += sequence.scored;
      owners.push_back(&queued);
    }
  }
  const PackedBatch packed = PackBatch(waiting, options_.num_shards, options_.max_batch_tokens);
  Pass pass = {.items = std::vector<std::vector<ScoreItem>>(packed.ranks.size()),
               .rows = packed.rows};
  for (size_t rank = 0; rank < packed.ranks.size(); ++rank) {
    for (const size_t s : packed.ranks[rank]) pass.items[rank].push_back(candidates[s]);
  }
  for (size_t s = 0; s < packed.count; ++s) owners[s]->next = candidates[s].index + 1;
  return pass;
}

absl::Status Scorer::ScoreBatch(const ShardedVersion& weights, const Pass& pass) {
  return OnAllRanks(weights, pass.items, [&](absl::Span<const std::vector<ScoreItem>> items) {
    return ranks_->Score(weights, items);
  });
}

absl::Status Scorer::OnAllRanks(
    const ShardedVersion& weights, absl::Span<const std::vector<ScoreItem>> all,
    absl::FunctionRef<absl::Status(absl::Span<const std::vector<ScoreItem>>)> run_here) {
  if (remote_ == nullptr) return run_here(all);
  const auto num_local = static_cast<size_t>(options_.local_shards);
  std::future<absl::Status> elsewhere = std::async(std::launch::async, [&] {
    absl::Status status = remote_->Score(weights.version, all.subspan(num_local));
    if (!status.ok()) ranks_->Abort(status);
    return status;
  });
  const absl::Status here = run_here(all.first(num_local));
  if (!here.ok()) remote_->Abort(here);
  const absl::Status there = elsewhere.get();
  return here.ok() ? there : here;
}

void Scorer::Account(const Pass& pass, std::chrono::microseconds time) {
  ++work_.passes;
  int64_t pass_tokens = 0;
  for (const std::vector<ScoreItem>& rank : pass.items) {
    for (const ScoreItem& item : rank) pass_tokens += item.input().num_tokens();
  }
  work_.tokens += pass_tokens;
  work_.shared_tokens += pass_tokens - pass.rows;
  work_.passing += time;
  work_.gathering += ranks_->gather_time();
  if (Clock::now() - last_log_ < kLogInterval) return;
  last_log_ = Clock::now();
  const int64_t passes = work_.passes - logged_.passes;
  const int64_t tokens = work_.tokens - logged_.tokens;
  const int64_t shared_tokens = work_.shared_tokens - logged_.shared_tokens;
  const int64_t passing = std::max<int64_t>(1, (work_.passing - logged_.passing).count());
  const int64_t gathering = (work_.gathering - logged_.gathering).count();
  ISOBIT_LOG(Info) << "scored " << tokens << " tokens, " << shared_tokens << " of them shared, in "
                   << passes << " passes of " << passing / passes << " us each, "
                   << tokens * 1'000'000 / passing << " tokens/s; the gathers of a pass took "
                   << gathering / passes << " us";
  logged_ = work_;
}

ScorerWork Scorer::work() const {
  const std::lock_guard lock(mutex_);
  return work_;
}

size_t Scorer::num_waiting() const {
  const std::lock_guard lock(mutex_);
  const auto waits = [](const Queued& queued) { return queued.next < queued.job->inputs().size(); };
  return held_.size() + static_cast<size_t>(std::count_if(jobs_.begin(), jobs_.end(), waits));
}

void Scorer::Fault(const absl::Status& status) {
  {
    const std::lock_guard lock(mutex_);
    fault_ = status;
    EndAllJobs(CheckRunning());
  }
  if (options_.on_fault) options_.on_fault(status);
}

absl::StatusOr<WeightUpdateResult> Scorer::UpdateWeights(const WeightUpdate& update) {
  if (update.stream != nullptr && remote_ != nullptr) {
    return absl::UnimplementedError(
        "weights by stream: the processes of this scorer read their shards from a directory each, "
        "expected UpdateWeights");
  }
  std::unique_lock lock(mutex_);
  ISOBIT_RETURN_IF_ERROR(CheckRunning());
  ISOBIT_ASSIGN_OR_RETURN(const uint64_t version, switch_.Begin(update, weights_->version));
  lock.unlock();
  absl::StatusOr<PreparedUpdate> prepared = Prepare(update, version);
  lock.lock();
  switch_.SetPrepared(std::move(prepared));
  std::optional<FinishedUpdate> finished;
  changed_.wait(lock, [&] {
    DropEndedJobs();
    finished = switch_.Settle(CheckRunning(),
                              [this](const WeightUpdate& waiting, WeightUpdateResult& result) {
                                return QuiesceFor(waiting, result);
                              });
    return finished.has_value();
  });
  AdmitHeldJobs();
  changed_.notify_all();
  lock.unlock();  // what has been replaced is freed outside the lock
  return std::move(finished->result);
}

absl::StatusOr<PreparedUpdate> Scorer::Prepare(const WeightUpdate& update, uint64_t version) {
  std::future<absl::Status> elsewhere;
  if (remote_ != nullptr) {
    elsewhere = std::async(std::launch::async, [&] {
      return remote_->Prepare(update.model_path, version, update.expected_digest,
                              this->version().id);
    });
  }
  ISOBIT_ASSIGN_OR_RETURN(
      std::shared_ptr<const ShardedVersion> next, ranks_->Cut(version, [&](WeightStore& store) {
        return PrepareWeights({options_.model_root, options_.load_format, options_.load_policy},
                              update, config(), store);
      }));
  if (remote_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(elsewhere.get());
    ISOBIT_RETURN_IF_ERROR(remote_->CheckDigest(next->version.digest));
  }
  std::string digest = next->version.digest;
  return PreparedUpdate{std::move(digest),
                        [this, next = std::move(next)](WeightUpdateResult& /*result*/) mutable {
                          weights_.swap(next);
                          static_cast<void>(Failpoint("weights.commit"));
                          return absl::OkStatus();
                        }};
}

bool Scorer::QuiesceFor(const WeightUpdate& update, WeightUpdateResult& result) {
  if (update.mode == InFlightMode::kAbort) {
    for (const Queued& queued : jobs_) {
      result.num_aborted += queued.job->End(
          absl::AbortedError(absl::StrCat("weights are switched to version ", result.current.id)));
    }
    DropEndedJobs();
  }
  return !running_ && jobs_.empty();
}

void Scorer::AdmitHeldJobs() {
  for (std::shared_ptr<ScoreJob>& job : std::exchange(held_, {})) {
    if (const absl::Status wanted = CheckVersion(*job); !wanted.ok()) {
      job->End(wanted);
    } else {
      jobs_.push_back({std::move(job)});
    }
  }
}

WeightVersion Scorer::version() const {
  const std::lock_guard lock(mutex_);
  return weights_->version;
}

size_t Scorer::shard_bytes() const {
  const std::lock_guard lock(mutex_);
  return weights_->ranks[0].total_bytes();
}

size_t Scorer::largest_block_bytes() const {
  size_t largest = 0;
  const WeightLayout& layout = ranks_->layout();
  for (int block = 0; block < layout.num_blocks(); ++block) {
    largest = std::max(largest, layout.BlockBytes(block));
  }
  return largest;
}

}  // namespace isobit
