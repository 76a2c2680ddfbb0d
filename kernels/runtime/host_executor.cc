// Forward, logits of the rows that need them, and this rank's share of the draws. See
// host_executor.h.
#include "kernels/runtime/host_executor.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "kernels/gather_all_reduce.h"
#include "kernels/model/probed_pass.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsBetween(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// The forward pass with one backend's numerics.
struct Path {
  Path(const RankOptions& options, const WeightLayout& layout, Backend& ops)
      : all_reduce(ops, options.comm),
        transformer(layout, options.rope, ops, options.comm.size() > 1 ? &all_reduce : nullptr) {}

  GatherAllReduce all_reduce;
  Transformer transformer;
};

class HostExecutor final : public RankExecutor, private ProbedRank {
 public:
  // variant_ops: may be null. embedding: where rank 0 keeps the one that all ranks of an engine
  // read; set by rank 0.
  static absl::StatusOr<std::unique_ptr<RankExecutor>> Create(
      const RankOptions& options, std::unique_ptr<Backend> ops,
      std::unique_ptr<Backend> variant_ops, int64_t kv_bytes,
      std::weak_ptr<std::byte[]>& embedding) {
    std::unique_ptr<HostExecutor> rank(
        new HostExecutor(options, std::move(ops), std::move(variant_ops), kv_bytes));
    const bool first = options.shape.rank == 0;
    ISOBIT_ASSIGN_OR_RETURN(rank->weights_,
                            ResidentWeights::Create(rank->layout_, rank->ops_->device(),
                                                    first ? nullptr : embedding.lock()));
    if (first) embedding = rank->weights_->embedding();
    return rank;
  }

  std::string backend() const override { return ops_->name(); }
  int depth() const override { return 1; }
  bool has_variant() const override { return variant_.has_value(); }
  RankMemory memory() const override {
    return {.weights = weights_->bytes(), .kv_cache = cache_.has_value() ? cache_->bytes() : 0};
  }

  absl::StatusOr<CacheSize> CacheThatFits(const CacheSize& most) const override {
    ISOBIT_ASSIGN_OR_RETURN(const RankShape whole, ShapeOfRank(layout_.config(), 0, 1));
    const CacheSize fit = KvCache::Fit(layout_.plan(), whole, most, static_cast<double>(kv_bytes_));
    if (fit.num_pages < 1) {
      return absl::ResourceExhaustedError(
          absl::StrCat("--kv_cache_mb holds no page: one takes ",
                       KvCache::PageBytes(layout_.plan(), whole, most.page_size),
                       " bytes over all ranks, of ", kv_bytes_));
    }
    return fit;
  }

  absl::Status AllocateKvCache(const CacheSize& size) override {
    ISOBIT_ASSIGN_OR_RETURN(cache_,
                            KvCache::Create(layout_.plan(), layout_.shape(), size, ops_->device()));
    return absl::OkStatus();
  }

  absl::Status Launch(const ModelStep& step) override {
    const auto width = static_cast<size_t>(layout_.config().hidden_size);
    const auto columns = static_cast<size_t>(layout_.shape().vocab.size());
    const size_t num_requests = step.requests.size();
    Grow(hidden_, step.batch.ids.size() * width);
    Grow(logits_, num_requests * columns);
    ISOBIT_RETURN_IF_ERROR(cache_->CopyPages(step.page_copies, *ops_));
    Transformer& transformer = step.variant ? variant_->transformer : path_.transformer;
    const Clock::time_point begin = Clock::now();
    ISOBIT_RETURN_IF_ERROR(transformer.Forward(step.batch, *weights_, *cache_, hidden_.data()));
    Grow(picked_, num_requests * width);
    for (size_t i = 0; i < num_requests; ++i) {
      std::copy_n(hidden_.data() + static_cast<size_t>(step.logit_rows[i]) * width, width,
                  picked_.data() + i * width);
    }
    ISOBIT_RETURN_IF_ERROR(transformer.Logits(picked_.data(), static_cast<int64_t>(num_requests),
                                              *weights_, logits_.data(),
                                              static_cast<int64_t>(columns)));
    const Clock::time_point logits = Clock::now();
    ISOBIT_RETURN_IF_ERROR(Draw(step.requests));
    times_ = {SecondsBetween(begin, logits), SecondsBetween(logits, Clock::now())};
    return absl::OkStatus();
  }

  absl::Status Collect(ModelStep& step) override {
    std::move(drawn_.begin(), drawn_.end(),
              step.results.begin() + static_cast<std::ptrdiff_t>(first_drawn_));
    if (time_steps_ && comm_.rank() == 0) step.times = times_;
    return absl::OkStatus();
  }

  absl::Status PrepareProbe(const ProbePass& pass) override {
    // One block's memory is enough for a pass that keeps nothing.
    ISOBIT_ASSIGN_OR_RETURN(probe_cache_,
                            KvCache::Create(layout_.plan(), layout_.shape(),
                                            {.num_pages = static_cast<int32_t>(pass.pages.size()),
                                             .page_size = page_size_,
                                             .shared = true},
                                            ops_->device()));
    return path_.transformer.PrepareProbe(static_cast<int64_t>(pass.ids.size()));
  }

  absl::Status RunProbe(const ProbePass& pass, ForwardProbe& probe) override {
    Grow(hidden_, pass.ids.size() * static_cast<size_t>(layout_.config().hidden_size));
    Grow(logits_, static_cast<size_t>(layout_.shape().vocab.size()));
    return RunProbedPass(path_.transformer, pass, *weights_,
                         {layout_, *probe_cache_, hidden_.data(), logits_.data()}, probe);
  }

  void DropProbe() override {
    probe_cache_.reset();
    path_.transformer.DropProbe();
  }

  ProbedRank* probed() override { return this; }
  ResidentWeights* weights() override { return weights_.get(); }
  KvCache* kv_cache() override { return cache_.has_value() ? &*cache_ : nullptr; }

  absl::Status Serve(const PreparedBlocks& prepared) override { return weights_->Commit(prepared); }

 private:
  HostExecutor(const RankOptions& options, std::unique_ptr<Backend> ops,
               std::unique_ptr<Backend> variant_ops, int64_t kv_bytes)
      : ops_(std::move(ops)),
        variant_ops_(std::move(variant_ops)),
        comm_(options.comm),
        page_size_(options.page_size),
        kv_bytes_(kv_bytes),
        time_steps_(options.time_steps),
        layout_(options.plan, options.shape, ops_->packer()),
        path_(options, layout_, *ops_) {
    if (variant_ops_ != nullptr) {
      variant_.emplace(options, layout_, *variant_ops_);
      variant_->transformer.ShareMemory(path_.transformer);
    }
  }

  template <typename T>
  static void Grow(std::vector<T>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  }

  // Each rank takes a run of the requests, whose logits it brings together from all ranks.
  absl::Status Draw(const std::vector<LogProbRequest>& requests) {
    const auto rank = static_cast<size_t>(comm_.rank());
    const auto size = static_cast<size_t>(comm_.size());
    first_drawn_ = requests.size() * rank / size;
    drawn_.resize(requests.size() * (rank + 1) / size - first_drawn_);
    const float* logits = logits_.data();
    if (size > 1) {
      Grow(whole_rows_, drawn_.size() * static_cast<size_t>(layout_.config().vocab_size));
      ISOBIT_RETURN_IF_ERROR(Assemble(requests.size()));
      logits = whole_rows_.data();
    }
    return ops_->Run(LogProbsArgs{.logits = logits,
                                  .ld = layout_.config().vocab_size,
                                  .requests = requests.data() + first_drawn_,
                                  .results = drawn_.data(),
                                  .num_rows = static_cast<int64_t>(drawn_.size()),
                                  .vocab = layout_.config().vocab_size});
  }

  // whole_rows_ = the logits of this rank's rows, out of the columns that each rank has computed.
  absl::Status Assemble(size_t num_rows) {
    const ModelConfig& config = layout_.config();
    const auto vocab = static_cast<size_t>(config.vocab_size);
    const size_t bytes =
        num_rows * static_cast<size_t>(layout_.shape().vocab.size()) * sizeof(float);
    ISOBIT_ASSIGN_OR_RETURN(const absl::Span<const void* const> sent,
                            comm_.Gather(logits_.data(), bytes));
    for (int r = 0; r < comm_.size(); ++r) {
      ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(config, r, comm_.size()));
      const auto columns = static_cast<size_t>(shape.vocab.size());
      const auto* from = static_cast<const float*>(sent[static_cast<size_t>(r)]);
      for (size_t i = 0; i < drawn_.size(); ++i) {
        std::copy_n(from + (first_drawn_ + i) * columns, columns,
                    whole_rows_.data() + i * vocab + shape.vocab.begin);
      }
    }
    return absl::OkStatus();
  }

  const std::unique_ptr<Backend> ops_;
  const std::unique_ptr<Backend> variant_ops_;
  Communicator& comm_;
  const int32_t page_size_;
  const int64_t kv_bytes_;  // of all ranks
  const bool time_steps_;
  const WeightLayout layout_;
  Path path_;
  std::optional<Path> variant_;
  std::optional<KvCache> cache_;
  std::optional<KvCache> probe_cache_;  // of a probed pass
  std::unique_ptr<ResidentWeights> weights_;

  // They grow and never shrink.
  std::vector<Bf16> hidden_;          // [rows of the step, hidden_size]
  std::vector<Bf16> picked_;          // [requests, hidden_size]: the row of each
  std::vector<float> logits_;         // [requests, this rank's columns]
  std::vector<float> whole_rows_;     // [drawn_, vocab]
  std::vector<LogProbResult> drawn_;  // of this rank's rows of the step, from first_drawn_ on
  size_t first_drawn_ = 0;
  DeviceTimes times_;  // of the step launched last
};

}  // namespace

MakeRank MakeHostRank(MakeHostOps make_ops, int64_t kv_bytes, MakeHostOps make_variant_ops) {
  return [make_ops = std::move(make_ops), make_variant_ops = std::move(make_variant_ops), kv_bytes,
          embedding = std::make_shared<std::weak_ptr<std::byte[]>>()](const RankOptions& options) {
    return HostExecutor::Create(
        options, make_ops(), make_variant_ops ? make_variant_ops() : nullptr, kv_bytes, *embedding);
  };
}

}  // namespace isobit
