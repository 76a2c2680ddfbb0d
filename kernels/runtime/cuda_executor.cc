// See cuda_executor.h. What a step puts on the rank's stream:
//   ids, tables -> feed -> [forward -> logits of this rank's columns] -> barrier -> this rank's
//   rows, whole -> draw -> barrier -> all ranks' ids
// The part in brackets is a graph in decode steps that fit the ladder, padded to a size of it.
#include "kernels/runtime/cuda_executor.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/log.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device/captured_graph.h"
#include "kernels/cuda/log_prob_stage.h"
#include "kernels/cuda/rows/step_kernels.h"
#include "kernels/runtime/cuda_rank_group.h"

namespace isobit {
namespace {

class CudaExecutor final : public RankExecutor {
 public:
  static absl::StatusOr<std::unique_ptr<RankExecutor>> Create(
      const RankOptions& options, const CudaRankOptions& cuda_options,
      std::shared_ptr<CudaRankGroup> group) {
    const int device = cuda_options.devices[static_cast<size_t>(options.shape.rank)];
    ISOBIT_ASSIGN_OR_RETURN(auto ops, MakeCudaOps({.device = device, .mode = options.mode}));
    ISOBIT_ASSIGN_OR_RETURN(auto all_reduce, group->MakeAllReduce(options, *ops));
    std::unique_ptr<CudaExecutor> rank(new CudaExecutor(
        options, cuda_options, device, std::move(group), std::move(ops), std::move(all_reduce)));
    ISOBIT_RETURN_IF_ERROR(rank->AllocateMemory());
    return rank;
  }

  ~CudaExecutor() override {
    // Kernels may still be reading what is freed here, and peers' kernels what they reach.
    static_cast<void>(ops_->device().Synchronize());
    for (Slot& slot : slots_) {
      if (slot.done != nullptr) cudaEventDestroy(slot.done);
    }
  }

  std::string backend() const override { return ops_->name(); }
  int depth() const override { return kDepth; }
  RankMemory memory() const override {
    RankMemory memory = {.weights = weights_->bytes(), .kv_cache = cache_->bytes()};
    memory.activations = ops_->device().allocated_bytes() - memory.total() + group_->shared_bytes;
    return memory;
  }

  absl::Status Launch(const ModelStep& step) override { return EndGroupOn(LaunchStep(step)); }
  absl::Status Collect(ModelStep& step) override { return EndGroupOn(CollectStep(step)); }

  ResidentWeights* weights() override { return weights_.get(); }

  absl::Status Serve(const StagedBlocks& staged) override {
    return EndGroupOn(ServeBlocks(staged));
  }

 private:
  static constexpr int kDepth = 2;
  // Far more than two steps compute: beyond it NCCL is taken to wait for a peer that will not come.
  static constexpr absl::Duration kLongestStep = absl::Seconds(30);

  // What a launched step leaves to be collected.
  struct Slot {
    cudaEvent_t done = nullptr;
    cuda::LogProbStage log_probs;
    LogProbArgs args;  // the rows of the step from first_row on, whose logits this rank has
    size_t first_row = 0;
    size_t own_begin = 0;  // of them, those that this rank reports
    size_t own_end = 0;
  };
  using Graphs = std::map<int64_t, cuda::CapturedGraph>;  // by padded batch size

  // A peer may wait for this rank in a collective that only this ends.
  absl::Status EndGroupOn(const absl::Status& status) const {
    if (!status.ok()) group_->Abort(status);
    return status;
  }

  absl::Status LaunchStep(const ModelStep& step) {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
    Slot& slot = slots_[num_launched_++ % kDepth];
    ids_ = step.batch.ids;
    for (size_t s = 0; s < step.feeds.size(); ++s) {
      if (step.feeds[s] < 0) continue;
      ids_[static_cast<size_t>(step.batch.sequences[s].first_row)] = -1 - step.feeds[s];
    }
    if (static_cast<int64_t>(step.requests.size()) > options_.max_sequences) {
      return absl::InvalidArgumentError(absl::StrCat("a step with ", step.requests.size(),
                                                     " rows that need logits: there is memory for ",
                                                     options_.max_sequences));
    }
    const auto graph = GraphOf(step);
    if (graph != graphs_.end()) {
      ISOBIT_RETURN_IF_ERROR(StageDecode(step.batch.sequences, graph->first).status());
      ISOBIT_RETURN_IF_ERROR(graph->second.Replay(stream().handle));
    } else {
      ISOBIT_RETURN_IF_ERROR(Forward(step));
    }
    ISOBIT_RETURN_IF_ERROR(Draw(step.requests, slot));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventRecord(slot.done, stream().handle));
    return absl::OkStatus();
  }

  absl::Status CollectStep(ModelStep& step) {
    Slot& slot = slots_[num_collected_++ % kDepth];
    ISOBIT_RETURN_IF_ERROR(Wait(slot.done));
    ISOBIT_RETURN_IF_ERROR(CheckPeers());
    slot.args.requests = step.requests.data() + slot.first_row;
    slot.args.results = step.results.data() + slot.first_row;
    slot.log_probs.Read(slot.args, static_cast<int64_t>(slot.own_begin),
                        static_cast<int64_t>(slot.own_end));
    return absl::OkStatus();
  }

  absl::Status ServeBlocks(const StagedBlocks& staged) {
    ISOBIT_RETURN_IF_ERROR(weights_->Commit(staged));
    if (!cuda_.use_graphs || !graphs_.empty()) return absl::OkStatus();
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
    return CaptureGraphs();
  }

  CudaExecutor(const RankOptions& options, const CudaRankOptions& cuda, int device,
               std::shared_ptr<CudaRankGroup> group, std::unique_ptr<CudaOps> ops,
               std::unique_ptr<AllReduce> all_reduce)
      : options_(options),
        cuda_(cuda),
        device_(device),
        group_(std::move(group)),
        ops_(std::move(ops)),
        layout_(options.config, options.shape, ops_->packer()),
        all_reduce_(std::move(all_reduce)),
        transformer_(layout_, options.rope, *ops_, all_reduce_.get()) {}

  const cuda::Stream& stream() const { return ops_->device().stream(); }
  size_t rank() const { return static_cast<size_t>(options_.shape.rank); }
  size_t num_ranks() const { return static_cast<size_t>(options_.shape.size); }
  int64_t max_positions() const {
    return 2 * static_cast<int64_t>(options_.rope.cosine.size()) / options_.config.head_dim;
  }

  absl::Status AllocateMemory() {
    const auto width = static_cast<size_t>(options_.config.hidden_size);
    const auto sequences = static_cast<size_t>(options_.max_sequences);
    ISOBIT_ASSIGN_OR_RETURN(weights_, ResidentWeights::Create(layout_, ops_->device()));
    ISOBIT_RETURN_IF_ERROR(transformer_.Reserve(options_.max_rows));
    ISOBIT_ASSIGN_OR_RETURN(
        hidden_,
        ops_->device().Allocate(static_cast<size_t>(options_.max_rows) * width * sizeof(Bf16)));
    ISOBIT_ASSIGN_OR_RETURN(picked_, ops_->device().Allocate(sequences * width * sizeof(Bf16)));
    ISOBIT_ASSIGN_OR_RETURN(ids_of_step_, ops_->device().Allocate(sequences * sizeof(int32_t)));
    const auto columns = static_cast<size_t>(group_->widest);
    if (group_->peers.empty() && num_ranks() > 1) {
      ISOBIT_ASSIGN_OR_RETURN(own_logits_,
                              ops_->device().Allocate(sequences * columns * sizeof(float)));
      ISOBIT_ASSIGN_OR_RETURN(
          all_logits_, ops_->device().Allocate(num_ranks() * sequences * columns * sizeof(float)));
      ISOBIT_ASSIGN_OR_RETURN(own_draws_, ops_->device().Allocate(sequences * sizeof(int32_t)));
      ISOBIT_ASSIGN_OR_RETURN(all_draws_,
                              ops_->device().Allocate(num_ranks() * sequences * sizeof(int32_t)));
      logits_ = reinterpret_cast<float*>(own_logits_.get());
      draws_ = reinterpret_cast<int32_t*>(own_draws_.get());
      const size_t part_bytes =
          cuda::LogProbPartBytes(options_.max_sequences, contract::kLeaves / options_.shape.size);
      ISOBIT_ASSIGN_OR_RETURN(own_parts_, ops_->device().Allocate(part_bytes));
      ISOBIT_ASSIGN_OR_RETURN(all_parts_, ops_->device().Allocate(num_ranks() * part_bytes));
      parts_ = own_parts_.get();
    } else {
      logits_ = reinterpret_cast<float*>(group_->logits.of_rank(options_.shape.rank));
      draws_ = reinterpret_cast<int32_t*>(group_->draws.of_rank(options_.shape.rank));
      parts_ = group_->parts.of_rank(options_.shape.rank);
    }
    if (num_ranks() > 1) {
      const size_t rows = CeilDiv(sequences, num_ranks());
      ISOBIT_ASSIGN_OR_RETURN(
          whole_rows_, ops_->device().Allocate(
                           rows * static_cast<size_t>(options_.config.vocab_size) * sizeof(float)));
    }
    const int64_t pages_of_sequence = CeilDiv(max_positions(), options_.page_size);
    ISOBIT_RETURN_IF_ERROR(ops_->tables().Reserve(
        options_.max_rows, options_.max_sequences,
        std::min<int64_t>(options_.max_sequences * pages_of_sequence, options_.num_pages)));
    for (Slot& slot : slots_) {
      ISOBIT_RETURN_IF_CUDA_ERROR(
          cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming | cudaEventBlockingSync));
      ISOBIT_RETURN_IF_ERROR(slot.log_probs.Reserve(options_.max_sequences, stream()));
    }
    ISOBIT_ASSIGN_OR_RETURN(
        cache_, KvCache::Create(options_.config, options_.shape, options_.num_pages,
                                options_.page_size, /*shared_layers=*/false, ops_->device()));
    return absl::OkStatus();
  }

  // The smallest graph that the step fits in, if it is one new token and one request a sequence.
  Graphs::iterator GraphOf(const ModelStep& step) {
    const size_t rows = step.batch.ids.size();
    if (rows != step.batch.sequences.size() || rows != step.requests.size()) return graphs_.end();
    return graphs_.lower_bound(static_cast<int64_t>(rows));
  }

  absl::StatusOr<StagedStep> StageDecode(absl::Span<const SequenceRows> sequences, int64_t size) {
    const auto bound = static_cast<int32_t>(size);
    return ops_->tables().StageWithin(ids_, sequences, options_.page_size,
                                      {.num_rows = bound,
                                       .num_sequences = bound,
                                       .max_rows = 1,
                                       .max_positions = static_cast<int32_t>(max_positions())});
  }

  absl::Status FeedIds(const StagedStep& step, int64_t rows) {
    return cuda::LaunchFeedIds(reinterpret_cast<const int32_t*>(ids_of_step_.get()), rows,
                               const_cast<int32_t*>(step.ids), stream());
  }

  // A step of `size` sequences of one row each, from their ids to their logits.
  absl::Status Decode(const StagedStep& step, int64_t size) {
    auto* const hidden = reinterpret_cast<Bf16*>(hidden_.get());
    ISOBIT_RETURN_IF_ERROR(FeedIds(step, size));
    ISOBIT_RETURN_IF_ERROR(transformer_.Forward(step, size, *weights_, *cache_, hidden));
    return transformer_.Logits(hidden, size, *weights_, logits_, layout_.shape().vocab.size());
  }

  // Any step, likewise.
  absl::Status Forward(const ModelStep& step) {
    const auto rows = static_cast<int64_t>(step.batch.ids.size());
    auto* const hidden = reinterpret_cast<Bf16*>(hidden_.get());
    ISOBIT_ASSIGN_OR_RETURN(const StagedStep staged,
                            ops_->tables().Stage(ids_, step.batch.sequences, options_.page_size));
    ISOBIT_RETURN_IF_ERROR(FeedIds(staged, rows));
    ISOBIT_RETURN_IF_ERROR(transformer_.Forward(staged, rows, *weights_, *cache_, hidden));
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* of_requests, RowsOfRequests(step, staged));
    return transformer_.Logits(of_requests, static_cast<int64_t>(step.requests.size()), *weights_,
                               logits_, layout_.shape().vocab.size());
  }

  // The hidden rows of the step's requests, one after the other.
  absl::StatusOr<const Bf16*> RowsOfRequests(const ModelStep& step, const StagedStep& staged) {
    const auto width = options_.config.hidden_size;
    const auto* const hidden = reinterpret_cast<const Bf16*>(hidden_.get());
    auto* const rows = reinterpret_cast<Bf16*>(picked_.get());
    if (step.requests.size() == step.batch.ids.size()) return hidden;
    if (HasLastRows(step)) {
      const auto sequences = static_cast<int64_t>(step.batch.sequences.size());
      ISOBIT_RETURN_IF_ERROR(cuda::LaunchLastRows(hidden, staged.sequences.device->first_row,
                                                  sequences, width, rows, stream()));
      return rows;
    }
    const std::vector<int64_t>& wanted = step.logit_rows;
    for (size_t begin = 0, end = 1; begin < wanted.size(); begin = end++) {
      while (end < wanted.size() && wanted[end] == wanted[end - 1] + 1) ++end;
      ISOBIT_RETURN_IF_ERROR(ops_->device().Copy(
          rows + static_cast<int64_t>(begin) * width, hidden + wanted[begin] * width,
          (end - begin) * static_cast<size_t>(width) * sizeof(Bf16)));
    }
    return rows;
  }

  // Whether the step's requests are about each sequence's last row.
  static bool HasLastRows(const ModelStep& step) {
    return std::equal(step.logit_rows.begin(), step.logit_rows.end(), step.batch.sequences.begin(),
                      step.batch.sequences.end(), [](int64_t row, const SequenceRows& rows) {
                        return row == rows.first_row + rows.num_rows - 1;
                      });
  }

  // Rows [begin, end) of a step, whose logits, of `columns` columns each, begin at `logits`.
  LogProbArgs Args(const std::vector<LogProbRequest>& requests, size_t begin, size_t end,
                   const float* logits, int64_t columns) const {
    return {.logits = logits,
            .ld = columns,
            .requests = requests.data() + begin,
            .num_rows = static_cast<int64_t>(end - begin),
            .vocab = options_.config.vocab_size};
  }

  // Rows are dealt out to the ranks in runs: [begin, end) to this one.
  std::pair<size_t, size_t> Dealt(size_t num_rows, size_t rank) const {
    return {num_rows * rank / num_ranks(), num_rows * (rank + 1) / num_ranks()};
  }

  absl::Status Draw(const std::vector<LogProbRequest>& requests, Slot& slot) {
    auto* const ids = reinterpret_cast<int32_t*>(ids_of_step_.get());
    if (num_ranks() == 1) {
      slot.own_end = requests.size();
      slot.args = Args(requests, 0, requests.size(), logits_, options_.config.vocab_size);
      return slot.log_probs.Launch(slot.args, ids, stream());
    }
    // Penalties' counts grow with every token: of such rows each rank would send all.
    const bool in_parts =
        std::none_of(requests.begin(), requests.end(), [](const LogProbRequest& request) {
          return cuda::IsRanked(request) || !request.sampling.counts.empty();
        });
    return in_parts && !requests.empty() ? DrawInParts(requests, slot, ids)
                                         : DrawDealt(requests, slot, ids);
  }

  // Every rank sums and draws in its ranges of the vocabulary and joins those of all, so that what
  // crosses the links is a few numbers of a row.
  absl::Status DrawInParts(const std::vector<LogProbRequest>& requests, Slot& slot, int32_t* ids) {
    slot.first_row = 0;
    std::tie(slot.own_begin, slot.own_end) = Dealt(requests.size(), rank());
    slot.args = Args(requests, 0, requests.size(), logits_, layout_.shape().vocab.size());
    ISOBIT_ASSIGN_OR_RETURN(const cuda::DeviceLogProbs sent,
                            slot.log_probs.Send(slot.args, ids, stream()));
    const int each = contract::kLeaves / options_.shape.size;
    ISOBIT_RETURN_IF_ERROR(cuda::LaunchLogProbParts(
        sent, {.first = options_.shape.rank * each, .count = each}, parts_, stream()));
    ISOBIT_ASSIGN_OR_RETURN(const cuda::LogProbParts parts, MeetParts(requests.size()));
    ISOBIT_RETURN_IF_ERROR(cuda::LaunchJoinLogProbs(sent, parts, stream()));
    return slot.log_probs.Fetch(slot.args, stream());
  }

  // Every rank brings its rows together, draws, and brings the draws of all together.
  absl::Status DrawDealt(const std::vector<LogProbRequest>& requests, Slot& slot, int32_t* ids) {
    const auto [begin, end] = Dealt(requests.size(), rank());
    slot.first_row = begin;
    slot.own_begin = 0;
    slot.own_end = end - begin;
    auto* const whole = reinterpret_cast<float*>(whole_rows_.get());
    slot.args = Args(requests, begin, end, whole, options_.config.vocab_size);
    ISOBIT_ASSIGN_OR_RETURN(const cuda::RankColumns columns, MeetLogits(requests.size()));
    ISOBIT_RETURN_IF_ERROR(cuda::LaunchGatherRows(columns, static_cast<int64_t>(slot.first_row),
                                                  slot.args.num_rows, whole, stream()));
    ISOBIT_RETURN_IF_ERROR(slot.log_probs.Launch(slot.args, draws_ + slot.first_row, stream()));
    ISOBIT_ASSIGN_OR_RETURN(cuda::RankDraws draws, MeetDraws(requests.size()));
    for (size_t r = 0; r < num_ranks(); ++r) {
      draws.begin[r + 1] = static_cast<int32_t>(Dealt(requests.size(), r).second);
    }
    return cuda::LaunchGatherDraws(draws, ids, stream());
  }

  // All ranks' parts are there. The next ones are written after the sums of the next step, to which
  // a peer comes once it has read these.
  absl::StatusOr<cuda::LogProbParts> MeetParts(size_t rows) {
    cuda::LogProbParts parts = {.num_ranks = options_.shape.size};
    const size_t bytes =
        cuda::LogProbPartBytes(static_cast<int64_t>(rows), contract::kLeaves / options_.shape.size);
    if (group_->peers.empty()) {
      ISOBIT_RETURN_IF_ERROR(
          group_->nccl[rank()]->AllGather(parts_, all_parts_.get(), bytes, stream().handle));
    } else {
      ISOBIT_RETURN_IF_ERROR(group_->peers[rank()]->Barrier(stream()));
    }
    for (size_t r = 0; r < num_ranks(); ++r) {
      parts.of_rank[r] = group_->peers.empty() ? all_parts_.get() + r * bytes
                                               : group_->parts.of_rank(static_cast<int>(r));
    }
    return parts;
  }

  // The two meetings of DrawDealt: all ranks' logits are there, then all draws. After the second
  // the peers have also read the logits, which the next step writes; it writes draws after its
  // first meeting, to which a peer comes once it has read those of this step.
  absl::StatusOr<cuda::RankColumns> MeetLogits(size_t rows) {
    cuda::RankColumns columns = group_->columns;
    if (!group_->peers.empty()) {
      ISOBIT_RETURN_IF_ERROR(group_->peers[rank()]->Barrier(stream()));
      return columns;
    }
    const size_t bytes = rows * static_cast<size_t>(group_->widest) * sizeof(float);
    ISOBIT_RETURN_IF_ERROR(
        group_->nccl[rank()]->AllGather(logits_, all_logits_.get(), bytes, stream().handle));
    for (size_t r = 0; r < num_ranks(); ++r) {
      columns.of_rank[r] = reinterpret_cast<const float*>(all_logits_.get() + r * bytes);
    }
    return columns;
  }

  absl::StatusOr<cuda::RankDraws> MeetDraws(size_t rows) {
    cuda::RankDraws draws = {.num_ranks = static_cast<int>(num_ranks())};
    const size_t bytes = rows * sizeof(int32_t);
    if (group_->peers.empty()) {
      ISOBIT_RETURN_IF_ERROR(
          group_->nccl[rank()]->AllGather(draws_, all_draws_.get(), bytes, stream().handle));
    } else {
      ISOBIT_RETURN_IF_ERROR(group_->peers[rank()]->Barrier(stream()));
    }
    for (size_t r = 0; r < num_ranks(); ++r) {
      const std::byte* const of_rank = group_->peers.empty()
                                           ? all_draws_.get() + r * bytes
                                           : group_->draws.of_rank(static_cast<int>(r));
      draws.of_rank[r] = reinterpret_cast<const int32_t*>(of_rank);
    }
    return draws;
  }

  // All ranks capture at the same time, each size after a run of it in which CUDA and the ops take
  // what memory they need.
  absl::Status CaptureGraphs() {
    const std::vector<int64_t> ladder = GraphLadder(options_.max_sequences);
    if (rank() == 0) {
      ISOBIT_LOG(Info) << "capturing decode graphs of 1 to " << ladder.back() << " sequences";
    }
    ids_.clear();
    for (auto size = ladder.rbegin(); size != ladder.rend(); ++size) {
      ISOBIT_ASSIGN_OR_RETURN(const StagedStep step, StageDecode({}, *size));
      ISOBIT_RETURN_IF_ERROR(Decode(step, *size));
      ISOBIT_RETURN_IF_ERROR(ops_->device().Synchronize());
      ISOBIT_ASSIGN_OR_RETURN(
          cuda::CapturedGraph graph,
          cuda::CapturedGraph::Capture(stream().handle, [&] { return Decode(step, *size); }));
      graphs_.emplace(*size, std::move(graph));
    }
    ISOBIT_RETURN_IF_ERROR(ops_->device().Synchronize());
    return CheckPeers();
  }

  // Waits for an event of the stream. With NCCL a peer that fails or hangs must end the wait.
  absl::Status Wait(cudaEvent_t event) const {
    if (group_->nccl.empty()) {
      ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(event));
      return absl::OkStatus();
    }
    const absl::Time limit = absl::Now() + cuda_.peer_timeout + kLongestStep;
    while (absl::Now() < limit) {
      const cudaError_t state = cudaEventQuery(event);
      if (state != cudaErrorNotReady) return cuda::CudaStatus(state, "a step");
      ISOBIT_RETURN_IF_ERROR(group_->nccl[rank()]->Check());
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", rank(), "'s step has not ended after ",
                     absl::FormatDuration(cuda_.peer_timeout + kLongestStep), ": a peer hangs"));
  }

  // Whether a kernel has given up waiting for a peer.
  absl::Status CheckPeers() const {
    return group_->peers.empty() ? absl::OkStatus() : group_->peers[rank()]->Check();
  }

  const RankOptions options_;
  const CudaRankOptions cuda_;
  const int device_;
  const std::shared_ptr<CudaRankGroup> group_;
  const std::unique_ptr<CudaOps> ops_;
  const WeightLayout layout_;
  const std::unique_ptr<AllReduce> all_reduce_;  // null: one rank
  Transformer transformer_;
  std::optional<KvCache> cache_;
  std::unique_ptr<ResidentWeights> weights_;  // at the addresses that the graphs hold
  Graphs graphs_;

  Memory hidden_;  // [max_rows, hidden_size] bf16
  Memory picked_;  // [max_sequences, hidden_size] bf16: rows of requests
  // With NCCL alone: what this rank sends, and what it has from all, [ranks, ...].
  Memory own_logits_, all_logits_, own_draws_, all_draws_, own_parts_, all_parts_;
  float* logits_ = nullptr;     // [max_sequences, this rank's columns]
  int32_t* draws_ = nullptr;    // [max_sequences]: what this rank has drawn, in its places
  std::byte* parts_ = nullptr;  // LogProbPartBytes: what its ranges of the vocabulary come to
  Memory whole_rows_;           // [this rank's rows, vocab] fp32, with several ranks
  Memory ids_of_step_;          // [max_sequences] int32: what the last launched step has drawn
  Slot slots_[kDepth];
  int64_t num_launched_ = 0;
  int64_t num_collected_ = 0;
  std::vector<int32_t> ids_;  // of the present step; -1 - i: what request i of the step before drew
};

}  // namespace

std::vector<int64_t> GraphLadder(int64_t max_sequences) {
  const int64_t most = std::min(max_sequences, kMaxGraphSequences);
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < most;) {
    sizes.push_back(size);
    size += size < 8 ? size : size < 64 ? 8 : size < 256 ? 32 : 64;
  }
  sizes.push_back(most);
  return sizes;
}

MakeRank MakeCudaRank(const CudaRankOptions& options) {
  auto group = std::make_shared<std::shared_ptr<CudaRankGroup>>();
  return
      [options, group](const RankOptions& rank) -> absl::StatusOr<std::unique_ptr<RankExecutor>> {
        if (rank.shape.rank == 0) {
          ISOBIT_ASSIGN_OR_RETURN(*group, CudaRankGroup::Create(options, rank));
        }
        return CudaExecutor::Create(rank, options, *group);
      };
}

}  // namespace isobit
