// The subcommand `ops` of isobit-bench: compares ops that only move memory with the copy rate.
#include "kernels/cuda/common/device/ops.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/gpu.h"
#include "bench/kernels/harness.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/common/step_tables/sequences.h"
#include "kernels/cuda/sm90/log_probs/log_probs.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/qkv.h"
#include "kernels/ops/swiglu.h"

namespace isobit::bench {
namespace {

// The sizes of Qwen3-8B.
constexpr int64_t kHidden = 4096;
constexpr int64_t kIntermediate = 12288;
constexpr int64_t kVocab = 151936;
constexpr int32_t kHeads = 32;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kHeadDim = 128;
constexpr int32_t kPageSize = 128;
constexpr int64_t kPositions = 4096;

constexpr int64_t kRows[] = {1, 64, 16384};      // small and large decode step; prefill
constexpr int64_t kLogitRows[] = {1, 64, 1024};  // likewise, rows of logits
constexpr double kTarget = 0.8;                  // of the copy rate, for the largest of each

// An op at one size. `call` works on the buffers of the given set.
struct Op {
  std::string name;
  int64_t rows = 0;
  double bytes = 0;  // that a call must move
  double target = 0;
  std::function<absl::Status(int64_t set, const cuda::Stream& stream)> call;
};

// What the ops work on; a set is a slice of each array.
class Operands {
 public:
  static absl::StatusOr<std::unique_ptr<Operands>> Create(cudaStream_t stream) {
    std::unique_ptr<Operands> o(new Operands);
    ISOBIT_ASSIGN_OR_RETURN(o->bf16_, RandomBf16(kArenaBytes, 1, 1.0f));
    ISOBIT_ASSIGN_OR_RETURN(o->fp32_, RandomFp32(kArenaBytes, 2, 2.0f));
    ISOBIT_ASSIGN_OR_RETURN(o->out_, AllocateDevice(kArenaBytes));
    ISOBIT_ASSIGN_OR_RETURN(o->norm_, RandomBf16(sizeof(Bf16) * kHidden, 3, 1.0f));
    ISOBIT_ASSIGN_OR_RETURN(o->table_, RandomFp32(sizeof(float) * kPositions * kHeadDim, 4, 1.0f));
    // Both phases of RoPE + KV write: one row of each of many sequences, and a few whole prompts.
    constexpr int64_t kPages = kPositions / kPageSize;
    const size_t cache_bytes = sizeof(Bf16) * size_t{64 * kPages * kKvHeads * kPageSize * kHeadDim};
    ISOBIT_ASSIGN_OR_RETURN(o->k_, AllocateDevice(cache_bytes));
    ISOBIT_ASSIGN_OR_RETURN(o->v_, AllocateDevice(cache_bytes));
    std::vector<int32_t> pages(64 * kPages);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
    for (const int64_t rows : kRows) {
      const int64_t count = std::min<int64_t>(rows, rows > 64 ? 8 : 64);
      std::vector<int32_t> ids;
      std::mt19937 random(2);
      for (int64_t i = 0; i < rows; ++i) ids.push_back(static_cast<int32_t>(random() % kVocab));
      std::vector<SequenceRows> sequences;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t length = rows / count;
        sequences.push_back({.first_row = i * length,
                             .num_rows = length,
                             .first_position = length == 1 ? kPositions - 1 : 0,
                             .pages = pages.data() + i * kPages});
      }
      o->uploads_.push_back(std::make_unique<cuda::StepTableUpload>());
      ISOBIT_RETURN_IF_ERROR(o->uploads_.back()->Upload(ids, sequences, kPageSize, {}, stream));
    }
    return o;
  }

  static constexpr size_t kArenaBytes = size_t{5} << 28;  // holds the embedding table

  // Slice `set` of an array that is cut into slices of `count` elements.
  Bf16* Input(int64_t set, int64_t count) const { return Slice<Bf16>(bf16_, set, count); }
  float* Floats(int64_t set, int64_t count) const { return Slice<float>(fp32_, set, count); }
  template <typename T>
  T* Output(int64_t set, int64_t count) const {
    return Slice<T>(out_, set, count);
  }
  const Bf16* norm() const { return reinterpret_cast<const Bf16*>(norm_.get()); }
  const float* table() const { return reinterpret_cast<const float*>(table_.get()); }
  const cuda::StepTableUpload& upload(int64_t rows) const {
    return *uploads_[static_cast<size_t>(std::ranges::find(kRows, rows) - std::begin(kRows))];
  }
  PagedKv kv() const {
    return {.k = reinterpret_cast<Bf16*>(k_.get()),
            .v = reinterpret_cast<Bf16*>(v_.get()),
            .page_size = kPageSize,
            .kv_heads = kKvHeads,
            .head_dim = kHeadDim};
  }

 private:
  Operands() = default;
  template <typename T>
  static T* Slice(const DeviceMemory& memory, int64_t set, int64_t count) {
    const int64_t slices = static_cast<int64_t>(kArenaBytes / sizeof(T)) / count;
    return reinterpret_cast<T*>(memory.get()) + set % slices * count;
  }

  DeviceMemory bf16_, fp32_, out_, norm_, table_, k_, v_;
  std::vector<std::unique_ptr<cuda::StepTableUpload>> uploads_;
};

// Ops that read and write rows of activations.
std::vector<Op> RowOps(const Operands& o, int64_t rows) {
  const double n = static_cast<double>(rows);
  const double target = rows == std::end(kRows)[-1] ? kTarget : 0;
  constexpr int64_t kQkv = int64_t{kHeads + 2 * kKvHeads} * kHeadDim;
  const auto norm = [&o, rows](int64_t set, const float* sum, const cuda::Stream& stream) {
    return cuda::Run(RmsNormArgs{.residual = o.Input(set, rows * kHidden),
                                 .sum = sum,
                                 .weight = o.norm(),
                                 .out = o.Output<Bf16>(set, rows * kHidden),
                                 .rows = rows,
                                 .hidden = kHidden,
                                 .eps = 1e-6f},
                     stream);
  };
  return {
      {"RMSNorm", rows, n * kHidden * 4, target,
       [norm](int64_t set, const cuda::Stream& stream) { return norm(set, nullptr, stream); }},
      {"residual + RMSNorm", rows, n * kHidden * 10, target,
       [&o, norm, rows](int64_t set, const cuda::Stream& stream) {
         return norm(set, o.Floats(set, rows * kHidden), stream);
       }},
      {"q/k norm + RoPE + KV", rows, n * (kQkv * 2 + (kHeads + 2 * kKvHeads) * kHeadDim * 2.0),
       target,
       [&o, rows](int64_t set, const cuda::Stream& stream) {
         return cuda::Run(QkvArgs{.qkv = o.Input(set, rows * kQkv),
                                  .ld = kQkv,
                                  .heads = kHeads,
                                  .q_norm = o.norm(),
                                  .k_norm = o.norm(),
                                  .eps = 1e-6f,
                                  .cosine = o.table(),
                                  .sine = o.table(),
                                  .sequences = {.host = {}, .device = &o.upload(rows).device()},
                                  .kv = o.kv()},
                          stream);
       }},
      {"SwiGLU", rows, n * kIntermediate * 6, target,
       [&o, rows](int64_t set, const cuda::Stream& stream) {
         return cuda::Run(SwiGluArgs{.gate_up = o.Input(set, rows * 2 * kIntermediate),
                                     .out = o.Output<Bf16>(set, rows * kIntermediate),
                                     .rows = rows,
                                     .columns = kIntermediate},
                          stream);
       }},
      {"embedding", rows, n * kHidden * 4, 0, [&o, rows](int64_t set, const cuda::Stream& stream) {
         return cuda::Run(EmbeddingArgs{.ids = o.upload(rows).ids(),
                                        .rows = rows,
                                        .table = o.Input(0, kVocab * kHidden),
                                        .hidden = kHidden,
                                        .out = o.Output<Bf16>(set, rows * kHidden)},
                          stream);
       }}};
}

// One kind of logprob op, with its rows in GPU memory for each set.
class LogProbOp {
 public:
  static absl::StatusOr<std::shared_ptr<LogProbOp>> Create(const Operands& o, int64_t rows,
                                                           const cuda::DeviceLogProbRow& kind,
                                                           int64_t sets) {
    auto op = std::make_shared<LogProbOp>();
    std::vector<cuda::DeviceLogProbRow> table;
    for (int64_t i = 0; i < sets * rows; ++i) {
      cuda::DeviceLogProbRow row = kind;
      row.logits = o.Floats(i / rows, rows * kVocab) + i % rows * kVocab;
      row.position = static_cast<uint32_t>(i);
      table.push_back(row);
    }
    const size_t bytes = table.size() * sizeof(table[0]);
    const int64_t top = std::max(1, kind.top_logprobs);
    ISOBIT_ASSIGN_OR_RETURN(op->rows_, AllocateDevice(bytes));
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(op->rows_.get(), table.data(), bytes, cudaMemcpyHostToDevice));
    ISOBIT_ASSIGN_OR_RETURN(op->results_, AllocateDevice(static_cast<size_t>(rows) *
                                                         sizeof(cuda::DeviceLogProbResult)));
    ISOBIT_ASSIGN_OR_RETURN(op->top_,
                            AllocateDevice(static_cast<size_t>(rows * top) * sizeof(TokenLogProb)));
    ISOBIT_ASSIGN_OR_RETURN(op->workspace_, AllocateDevice(cuda::LogProbWorkspaceBytes(rows)));
    op->args_ = {.num_rows = rows,
                 .vocab = kVocab,
                 .results = reinterpret_cast<cuda::DeviceLogProbResult*>(op->results_.get()),
                 .top = reinterpret_cast<TokenLogProb*>(op->top_.get()),
                 .top_stride = top,
                 .workspace = op->workspace_.get(),
                 .ranked_rows = kind.top_logprobs > 0 || kind.top_k > 0 || kind.top_p < 1.0f};
    return op;
  }

  absl::Status Run(int64_t set, const cuda::Stream& stream) const {
    cuda::DeviceLogProbs args = args_;
    args.rows = reinterpret_cast<const cuda::DeviceLogProbRow*>(rows_.get()) + set * args.num_rows;
    return cuda::LaunchLogProbs(args, stream);
  }

 private:
  DeviceMemory rows_, results_, top_, workspace_;
  cuda::DeviceLogProbs args_;
};

int64_t SetsOf(const Harness& harness, double bytes) {
  const double sweep = 3.0 * static_cast<double>(harness.device().l2_bytes) / bytes;
  return std::clamp<int64_t>(static_cast<int64_t>(sweep) + 1, 1, 256);
}

absl::StatusOr<std::vector<Op>> LogitOps(const Harness& harness, const Operands& o, int64_t rows) {
  cuda::DeviceLogProbRow score;
  score.target = 17;
  cuda::DeviceLogProbRow greedy;
  greedy.temperature = 0.0f;
  cuda::DeviceLogProbRow sample;
  sample.temperature = 0.8f;
  cuda::DeviceLogProbRow top_p = sample;
  top_p.top_p = 0.95f;
  cuda::DeviceLogProbRow top_k = top_p;
  top_k.top_k = 50;
  cuda::DeviceLogProbRow top_list = score;
  top_list.top_logprobs = 20;
  const std::pair<const char*, cuda::DeviceLogProbRow> kinds[] = {
      {"logprob of an id", score},   {"logprob, top 20", top_list},
      {"sample, greedy", greedy},    {"sample, plain", sample},
      {"sample, top-p 0.95", top_p}, {"sample, top-k 50 top-p 0.95", top_k}};
  const double bytes = static_cast<double>(rows * kVocab) * sizeof(float);
  const bool large = rows == std::end(kLogitRows)[-1];
  std::vector<Op> ops;
  for (const auto& [name, kind] : kinds) {
    ISOBIT_ASSIGN_OR_RETURN(const std::shared_ptr<LogProbOp> op,
                            LogProbOp::Create(o, rows, kind, SetsOf(harness, bytes)));
    ops.push_back({name, rows, bytes, large && ops.empty() ? kTarget : 0,
                   [op](int64_t set, const cuda::Stream& stream) { return op->Run(set, stream); }});
  }
  return ops;
}

}  // namespace

absl::Status BenchOps() {
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Harness> harness, Harness::Create());
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Operands> operands,
                          Operands::Create(harness->stream()));
  std::vector<Op> ops;
  for (const int64_t rows : kRows) {
    for (Op& op : RowOps(*operands, rows)) ops.push_back(std::move(op));
  }
  for (const int64_t rows : kLogitRows) {
    ISOBIT_ASSIGN_OR_RETURN(std::vector<Op> some, LogitOps(*harness, *operands, rows));
    for (Op& op : some) ops.push_back(std::move(op));
  }
  std::ranges::stable_sort(ops, {}, &Op::name);

  absl::PrintF(
      "%sOps of Qwen3-8B's sizes (hidden %d, intermediate %d, vocabulary %d): graph replay, median "
      "of %d "
      "rounds, cold in L2.\nGB/s of the bytes a call must move, beside the copy rate.\n\n"
      "%-28s %6s %10s %10s %9s %7s %8s\n",
      harness->Describe(), kHidden, kIntermediate, kVocab, PlanOfFlags().rounds, "op", "rows",
      "ours us", "no PDL us", "MB", "GB/s", "of copy");
  nlohmann::json report = MachineReport(*harness);
  int below = 0;
  for (const Op& op : ops) {
    const int64_t sets = SetsOf(*harness, op.bytes);
    const auto call = [&](int64_t i, const cuda::Stream& stream) {
      return op.call(i % sets, stream);
    };
    const Contender contenders[] = {{.dependent = true, .call = call},
                                    {.dependent = false, .call = call}};
    ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times,
                            harness->Race(contenders, std::max<int64_t>(sets, 4), PlanOfFlags()));
    const double us = Median(times[0]);
    const double share = harness->Roofline(op.bytes, 0) / us;
    const bool missed = share < op.target;
    below += missed ? 1 : 0;
    absl::PrintF("%-28s %6d %10.2f %10.2f %9.2f %7.0f %6.0f%%%s\n", op.name, op.rows, us,
                 Median(times[1]), op.bytes / 1e6, op.bytes / us / 1e3, 100 * share,
                 missed ? " !" : "");
    std::fflush(stdout);
    report["cases"].push_back({{"op", op.name},
                               {"rows", op.rows},
                               {"us", us},
                               {"without_pdl_us", Median(times[1])},
                               {"bytes", op.bytes},
                               {"share_of_copy", share},
                               {"target", op.target}});
  }
  absl::PrintF("\ntarget: %.0f%% of the copy rate at the largest size; below: %d\n", 100 * kTarget,
               below);
  return WriteReport(report);
}

}  // namespace isobit::bench
