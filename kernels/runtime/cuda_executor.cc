// See cuda_executor.h. What a step puts on the rank's stream:
//   ids, tables -> feed -> [forward -> logits of this rank's columns] -> draws (step_draws.h)
// The part in brackets is a graph in decode steps that fit one (step_graphs.h).
#include "kernels/runtime/cuda_executor.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/base/log.h"
#include "common/base/round_up.h"
#include "common/base/spin_wait.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "common/parallel/nccl_weight_senders.h"
#include "kernels/cuda/common/rows/step_kernels.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/model/probed_pass.h"
#include "kernels/runtime/cuda_rank_group.h"
#include "kernels/runtime/rank_exchange.h"
#include "kernels/runtime/step_draws.h"
#include "kernels/runtime/step_events.h"
#include "kernels/runtime/step_graphs.h"
#include "kernels/runtime/variant_pass.h"

namespace isobit {
namespace {

// What is taken once the KV cache is there: graphs, kernels' code, NCCL's channels, and the
// workspaces of attention and cuBLAS. With Qwen3-8B and graphs of up to 512 sequences that was
// 0.2 GB on an H200, and NCCL took 0.8 GB more.
constexpr size_t kLaterBytes = size_t{2} << 30;

class CudaExecutor final : public RankExecutor, private ProbedRank {
 public:
  static absl::StatusOr<std::unique_ptr<RankExecutor>> Create(
      const RankOptions& options, const CudaRankOptions& cuda_options,
      std::shared_ptr<CudaRankGroup> group) {
    const int device = cuda_options.devices[static_cast<size_t>(options.shape.rank)];
    ISOBIT_ASSIGN_OR_RETURN(auto ops,
                            CudaBackend::Create({.device = device, .mode = options.mode}));
    ops->device().SetWeightSenders(MakeNcclWeightSenders(device, ops->device().side_stream()));
    ISOBIT_ASSIGN_OR_RETURN(auto all_reduce, group->MakeAllReduce(options, *ops));
    ISOBIT_ASSIGN_OR_RETURN(auto exchange, group->MakeExchange(options.shape.rank, ops->device()));
    std::unique_ptr<CudaExecutor> rank(
        new CudaExecutor(options, cuda_options, device, std::move(group), std::move(ops),
                         std::move(all_reduce), std::move(exchange)));
    ISOBIT_RETURN_IF_ERROR(rank->AllocateMemory());
    return rank;
  }

  ~CudaExecutor() override {
    // Kernels may still be reading what is freed here, and peers' kernels what they reach.
    static_cast<void>(ops_->device().Synchronize());
  }

  std::string backend() const override { return ops_->name(); }
  int depth() const override { return kDepth; }
  bool has_variant() const override { return variant_ != nullptr; }
  RankMemory memory() const override {
    RankMemory memory = {.weights = weights_->bytes(),
                         .kv_cache = cache_.has_value() ? cache_->bytes() : 0};
    // Another thread may be giving memory back or taking it, between the two readings.
    const size_t allocated = std::max(ops_->device().allocated_bytes(), memory.total());
    memory.activations = allocated - memory.total() + group_->bytes_of_rank() +
                         ops_->tables().device_bytes() + draws_->bytes();
    return memory;
  }

  absl::StatusOr<CacheSize> CacheThatFits(const CacheSize& most) const override {
    const auto taken = static_cast<double>(memory().total() + kLaterBytes);
    const auto free = static_cast<double>(group_->free_bytes[rank()]);
    const CacheSize fit =
        KvCache::Fit(options_.plan, options_.shape, most, free * cuda_.memory_fraction - taken);
    if (fit.num_pages < 1) {
      return absl::ResourceExhaustedError(
          absl::StrCat("GPU ", device_, ": weights and activations of rank ", rank(), " take ",
                       taken / 1e9, " GB, which leaves no KV page of ", free / 1e9,
                       " GB free memory, of which ", cuda_.memory_fraction,
                       " may be taken; more ranks, fewer tokens in a step or a larger "
                       "fraction would help"));
    }
    return fit;
  }

  absl::Status AllocateKvCache(const CacheSize& size) override {
    const int64_t pages_of_sequence = CeilDiv(max_positions(), options_.page_size);
    ISOBIT_RETURN_IF_ERROR(ops_->tables().Reserve(
        options_.max_rows, options_.max_sequences,
        std::min<int64_t>(options_.max_sequences * pages_of_sequence, size.num_pages)));
    ISOBIT_ASSIGN_OR_RETURN(cache_,
                            KvCache::Create(options_.plan, options_.shape, size, ops_->device()));
    return absl::OkStatus();
  }

  absl::Status Launch(const ModelStep& step) override { return EndGroupOn(LaunchStep(step)); }
  absl::Status Collect(ModelStep& step) override { return EndGroupOn(CollectStep(step)); }

  absl::Status PrepareProbe(const ProbePass& pass) override {
    ISOBIT_ASSIGN_OR_RETURN(probe_cache_,
                            KvCache::Create(options_.plan, options_.shape,
                                            {.num_pages = static_cast<int32_t>(pass.pages.size()),
                                             .page_size = options_.page_size,
                                             .shared = true},
                                            ops_->device()));
    return transformer_.PrepareProbe(static_cast<int64_t>(pass.ids.size()));
  }
  absl::Status RunProbe(const ProbePass& pass, ForwardProbe& probe) override {
    return EndGroupOn(ComputeProbe(pass, probe));
  }
  void DropProbe() override {
    static_cast<void>(ops_->device().Synchronize());  // a pass that failed may still run
    probe_cache_.reset();
    transformer_.DropProbe();
  }

  ProbedRank* probed() override { return this; }
  ResidentWeights* weights() override { return weights_.get(); }
  KvCache* kv_cache() override { return cache_.has_value() ? &*cache_ : nullptr; }

  absl::Status Serve(const PreparedBlocks& prepared) override {
    return EndGroupOn(ServeBlocks(prepared));
  }

 private:
  static constexpr int kDepth = 2;
  // Far more than two steps compute: beyond it NCCL is taken to wait for a peer that will not come.
  static constexpr absl::Duration kLongestStep = absl::Seconds(30);

  // A peer may wait for this rank in a collective that only this ends.
  absl::Status EndGroupOn(const absl::Status& status) const {
    if (!status.ok()) group_->Abort(status);
    return status;
  }

  absl::Status LaunchStep(const ModelStep& step) {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
    // Before the upload: what comes after that may read the past early (device_sequences.h).
    ISOBIT_RETURN_IF_ERROR(cache_->CopyPages(step.page_copies, *ops_));
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
    if (step.variant && variant_ == nullptr) {
      return absl::InvalidArgumentError("a variant step: this rank has no variant pass");
    }
    const StepGraphs& graphs = step.variant ? variant_->graphs() : graphs_;
    if (const StepGraphs::Graph* const graph = graphs.Find(step)) {
      ISOBIT_ASSIGN_OR_RETURN(const UploadedStep uploaded,
                              UploadDecode(step.batch.sequences, graph->shape,
                                           graph->sharing ? cuda_.sharing : cuda::Sharing::kNever));
      ISOBIT_RETURN_IF_ERROR(events_->BeginForward(stream().handle));
      ISOBIT_RETURN_IF_ERROR(graph->For(uploaded).Replay(stream().handle));
    } else {
      ISOBIT_RETURN_IF_ERROR(Forward(step));
    }
    ISOBIT_RETURN_IF_ERROR(events_->BeginDraw(stream().handle));
    ISOBIT_RETURN_IF_ERROR(draws_->Launch(step.requests));
    return events_->End(stream().handle);
  }

  absl::Status CollectStep(ModelStep& step) {
    if (step.is_awaited) AwaitAwake(events_->oldest_end());
    ISOBIT_RETURN_IF_ERROR(Wait(events_->oldest_end(), step.variant));
    ISOBIT_ASSIGN_OR_RETURN(const DeviceTimes times, events_->Take());
    if (rank() == 0) step.times = times;
    ISOBIT_RETURN_IF_ERROR(CheckPeers());
    draws_->Collect(step);
    return absl::OkStatus();
  }

  absl::Status ComputeProbe(const ProbePass& pass, ForwardProbe& probe) {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
    // A rank whose host is slow would let its peers' kernels wait beyond their timeout.
    probe.ReadFrom(ops_->device(), [this] { return options_.comm.Barrier(); });
    auto* const hidden = reinterpret_cast<Bf16*>(hidden_.get());
    ISOBIT_RETURN_IF_ERROR(RunProbedPass(
        transformer_, pass, *weights_, {layout_, *probe_cache_, hidden, draws_->logits()}, probe));
    return CheckPeers();
  }

  absl::Status ServeBlocks(const PreparedBlocks& prepared) {
    ISOBIT_RETURN_IF_ERROR(weights_->Commit(prepared));
    if (variant_ != nullptr) ISOBIT_RETURN_IF_ERROR(variant_->CopyWeights(*weights_));
    if (!cuda_.use_graphs || !graphs_.empty()) return absl::OkStatus();
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
    return CaptureGraphs();
  }

  CudaExecutor(const RankOptions& options, const CudaRankOptions& cuda, int device,
               std::shared_ptr<CudaRankGroup> group, std::unique_ptr<CudaBackend> ops,
               std::unique_ptr<AllReduce> all_reduce, std::unique_ptr<RankExchange> exchange)
      : options_(options),
        cuda_(cuda),
        device_(device),
        group_(std::move(group)),
        ops_(std::move(ops)),
        layout_(options.plan, options.shape, ops_->packer()),
        all_reduce_(std::move(all_reduce)),
        exchange_(std::move(exchange)),
        transformer_(layout_, options.rope, *ops_, all_reduce_.get()) {}

  const cuda::Stream& stream() const { return ops_->device().stream(); }
  size_t rank() const { return static_cast<size_t>(options_.shape.rank); }
  int64_t max_positions() const {
    return 2 * static_cast<int64_t>(options_.rope.cosine.size()) / options_.plan.config.head_dim;
  }

  // All that steps need but the KV cache and what depends on its pages.
  absl::Status AllocateMemory() {
    const auto row_bytes = static_cast<size_t>(options_.plan.config.hidden_size) * sizeof(Bf16);
    if (cuda_.variant) {
      ISOBIT_ASSIGN_OR_RETURN(variant_, VariantPass::Create(options_, *group_, *ops_, layout_));
    }
    ISOBIT_ASSIGN_OR_RETURN(
        weights_, ResidentWeights::Create(layout_, ops_->device(), /*embedding=*/nullptr,
                                          variant_ != nullptr ? &variant_->layout() : nullptr));
    ISOBIT_RETURN_IF_ERROR(transformer_.Reserve(options_.max_rows));
    if (variant_ != nullptr) {
      ISOBIT_RETURN_IF_ERROR(variant_->Reserve(options_.max_rows, transformer_));
    }
    ISOBIT_ASSIGN_OR_RETURN(
        hidden_, ops_->device().Allocate(static_cast<size_t>(options_.max_rows) * row_bytes));
    ISOBIT_ASSIGN_OR_RETURN(
        picked_, ops_->device().Allocate(static_cast<size_t>(options_.max_sequences) * row_bytes));
    ISOBIT_ASSIGN_OR_RETURN(draws_, StepDraws::Create(group_->draw_shape, options_.shape.rank,
                                                      kDepth, ops_->device(), *exchange_));
    ISOBIT_ASSIGN_OR_RETURN(events_,
                            StepEvents::Create(kDepth, options_.time_steps && rank() == 0));
    return absl::OkStatus();
  }

  int32_t kv_heads() const { return static_cast<int32_t>(options_.shape.kv_heads.size()); }

  absl::StatusOr<UploadedStep> UploadDecode(absl::Span<const SequenceRows> sequences,
                                            const GraphShape& shape, cuda::Sharing sharing) {
    return ops_->tables().UploadWithin(ids_, sequences, options_.page_size,
                                       {.num_rows = static_cast<int32_t>(shape.rows),
                                        .num_sequences = static_cast<int32_t>(shape.sequences),
                                        .max_rows = shape.rows_of_sequence,
                                        .max_positions = static_cast<int32_t>(max_positions()),
                                        .sharing = sharing,
                                        .kv_heads = kv_heads()});
  }

  absl::Status FeedIds(const UploadedStep& step, int64_t rows) {
    return cuda::LaunchFeedIds(draws_->ids(), rows, const_cast<int32_t*>(step.ids), stream());
  }

  // A step of so many rows, all of which need logits, from their ids to their logits.
  absl::Status Decode(const UploadedStep& step, int64_t rows, Transformer& transformer) {
    auto* const hidden = reinterpret_cast<Bf16*>(hidden_.get());
    ISOBIT_RETURN_IF_ERROR(FeedIds(step, rows));
    ISOBIT_RETURN_IF_ERROR(transformer.Forward(step, rows, *weights_, *cache_, hidden));
    return transformer.Logits(hidden, rows, *weights_, draws_->logits(),
                              layout_.shape().vocab.size());
  }

  // Any step, likewise.
  absl::Status Forward(const ModelStep& step) {
    const auto rows = static_cast<int64_t>(step.batch.ids.size());
    auto* const hidden = reinterpret_cast<Bf16*>(hidden_.get());
    ISOBIT_ASSIGN_OR_RETURN(
        const UploadedStep uploaded,
        ops_->tables().UploadWithin(ids_, step.batch.sequences, options_.page_size,
                                    {.writes_past = step.batch.writes_past,
                                     .sharing = cuda_.sharing,
                                     .kv_heads = kv_heads()}));
    ISOBIT_RETURN_IF_ERROR(events_->BeginForward(stream().handle));
    ISOBIT_RETURN_IF_ERROR(FeedIds(uploaded, rows));
    Transformer& transformer = step.variant ? variant_->transformer() : transformer_;
    ISOBIT_RETURN_IF_ERROR(transformer.Forward(uploaded, rows, *weights_, *cache_, hidden));
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* of_requests, RowsOfRequests(step));
    return transformer.Logits(of_requests, static_cast<int64_t>(step.requests.size()), *weights_,
                              draws_->logits(), layout_.shape().vocab.size());
  }

  // The hidden rows of the step's requests, one after the other.
  absl::StatusOr<const Bf16*> RowsOfRequests(const ModelStep& step) {
    const auto* const hidden = reinterpret_cast<const Bf16*>(hidden_.get());
    auto* const rows = reinterpret_cast<Bf16*>(picked_.get());
    ISOBIT_RETURN_IF_ERROR(cuda::LaunchPickRows(hidden, step.logit_rows,
                                                options_.plan.config.hidden_size, rows, stream()));
    return rows;
  }

  // All ranks capture at the same time.
  absl::Status CaptureGraphs() {
    const std::vector<int64_t> sizes = GraphSizes(options_.max_sequences);
    if (rank() == 0) {
      ISOBIT_LOG(Info) << "capturing decode graphs of 1 to " << sizes.back() << " sequences";
    }
    ids_.clear();
    const auto guesses = cuda_.max_guesses > 0
                             ? GuessGraphShapes(options_.max_sequences, cuda_.max_guesses)
                             : std::vector<GraphShape>();
    const auto capture = [&](Transformer& transformer, const std::vector<GraphShape>& with_guesses,
                             StepGraphs& graphs) {
      return graphs.Capture(
          sizes, with_guesses, cuda_.sharing != cuda::Sharing::kNever, stream().handle,
          [&](const GraphShape& shape, cuda::Sharing sharing) {
            return UploadDecode({}, shape, sharing);
          },
          [&](const UploadedStep& step, int64_t rows) { return Decode(step, rows, transformer); });
    };
    ISOBIT_RETURN_IF_ERROR(capture(transformer_, guesses, graphs_));
    if (variant_ != nullptr) {
      // Guesses are there to be verified, which the variant pass does not.
      ISOBIT_RETURN_IF_ERROR(capture(variant_->transformer(), {}, variant_->graphs()));
    }
    return CheckPeers();
  }

  // Polls until the event has come, or for kMostAwake.
  static void AwaitAwake(cudaEvent_t event) {
    const auto end = std::chrono::steady_clock::now() + kMostAwake;
    while (cudaEventQuery(event) == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
      RelaxCore();
    }
  }

  // Waits for the end of the oldest step. With NCCL a peer that fails or hangs must end the wait.
  absl::Status Wait(cudaEvent_t event, bool variant) const {
    if (!group_->SumsByNccl(variant ? kVariantMode : options_.mode)) {
      ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(event));
      return absl::OkStatus();
    }
    const auto limit = std::chrono::steady_clock::now() +
                       absl::ToChronoNanoseconds(cuda_.peer_timeout + kLongestStep);
    while (std::chrono::steady_clock::now() < limit) {
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
  const std::unique_ptr<CudaBackend> ops_;
  const WeightLayout layout_;
  const std::unique_ptr<AllReduce> all_reduce_;  // null: one rank
  const std::unique_ptr<RankExchange> exchange_;
  Transformer transformer_;
  std::optional<KvCache> cache_;
  std::optional<KvCache> probe_cache_;        // of a probed pass
  std::unique_ptr<ResidentWeights> weights_;  // at the addresses that the graphs hold
  std::unique_ptr<StepDraws> draws_;
  StepGraphs graphs_;
  std::unique_ptr<VariantPass> variant_;  // null: there is none

  Memory hidden_;  // [max_rows, hidden_size] bf16
  Memory picked_;  // [max_sequences, hidden_size] bf16: rows of requests
  std::unique_ptr<StepEvents> events_;
  std::vector<int32_t> ids_;  // of the present step; -1 - i: what request i of the step before drew
};

}  // namespace

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
