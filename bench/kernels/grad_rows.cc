// The row-wise ops of training, the logprobs and the optimizer: what they take beside the copy
// rate, at the sizes of Qwen3-8B.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "bench/kernels/grad.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/device/card.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/log_probs.h"
#include "kernels/ops/losses.h"
#include "kernels/ops/optimizer.h"
#include "kernels/ops/packs.h"
#include "kernels/ops/qkv.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/swiglu.h"

namespace isobit::bench {
namespace {

constexpr int64_t kRows = 16384;
constexpr int64_t kHidden = 4096;
constexpr int64_t kIntermediate = 12288;
constexpr int32_t kHeads = 32;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kHeadDim = 128;
constexpr int64_t kQkv = int64_t{kHeads + 2 * kKvHeads} * kHeadDim;
constexpr int64_t kPositions = 2048;
constexpr int64_t kVocab = 151936;
constexpr int64_t kLogitRows = 4096;
constexpr int64_t kParameters = 24576 * kHidden;  // of gate_up: 100 million
constexpr int64_t kNorms = 4 << 20;               // rows of parameters
constexpr double kTarget = 0.8;                   // of the copy rate

constexpr int64_t kEightPacks[] = {0, 2048, 4096, 6144, 8192, 10240, 12288, 14336, kRows};
constexpr int64_t kOnePack[] = {0, kRows};

// An op, and the memory that its call works on.
struct Op {
  std::string name;
  double bytes = 0;   // that a call must move
  double target = 0;  // of the copy rate
  std::vector<std::shared_ptr<std::byte>> memory = {};
  std::function<absl::Status(const cuda::Stream& stream)> call = {};

  // `count` elements, random or zero, that live as long as the op.
  template <typename T>
  absl::StatusOr<T*> Add(int64_t count, float scale = 0.0f) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    const auto seed = static_cast<uint32_t>(memory.size());
    absl::StatusOr<DeviceMemory> added = scale == 0.0f ? AllocateDevice(bytes)
                                         : sizeof(T) == sizeof(Bf16)
                                             ? RandomBf16(bytes, seed, scale)
                                             : RandomFp32(bytes, seed, scale);
    if (!added.ok()) return added.status();
    memory.emplace_back(*std::move(added));
    return reinterpret_cast<T*>(memory.back().get());
  }
  template <typename T>
  absl::StatusOr<T*> AddCopy(const std::vector<T>& values) {
    ISOBIT_ASSIGN_OR_RETURN(T* const copy, Add<T>(static_cast<int64_t>(values.size())));
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(copy, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return copy;
  }
};

// A call whose scratch is allocated here, by a first call.
template <typename Args>
absl::StatusOr<std::function<absl::Status(const cuda::Stream&)>> WithScratch(const Args& args) {
  const auto memory = std::make_shared<DeviceMemory>();
  const auto scratch =
      std::make_shared<cuda::Scratch>([memory](size_t bytes) -> absl::StatusOr<std::byte*> {
        if (*memory == nullptr) {
          ISOBIT_ASSIGN_OR_RETURN(*memory, AllocateDevice(bytes));
        }
        return memory->get();
      });
  const auto call = [args, scratch](cuda::Stream stream) {
    stream.scratch = scratch.get();
    return cuda::Run(args, stream);
  };
  ISOBIT_ASSIGN_OR_RETURN(const cuda::Card card, cuda::GetCard(0));
  ISOBIT_RETURN_IF_ERROR(call({.dependent = false, .card = &card}));
  return call;
}

absl::StatusOr<Op> ColumnSumsOp() {
  Op op{.name = "column sums (bias of qkv)", .bytes = 2.0 * kRows * kQkv, .target = kTarget};
  ColumnSumsArgs args = {.ldx = kQkv, .columns = kQkv, .packs = kEightPacks};
  ISOBIT_ASSIGN_OR_RETURN(args.x, op.Add<Bf16>(kRows * kQkv, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.out, op.Add<float>(kQkv));
  ISOBIT_ASSIGN_OR_RETURN(op.call, WithScratch(args));
  return op;
}

absl::StatusOr<Op> NormOp(PackBounds packs) {
  Op op{.name = absl::StrCat("RMSNorm gradient, packs: ", packs.size() - 1),
        .bytes = 6.0 * kRows * kHidden,
        .target = kTarget};
  RmsNormGradientArgs args = {.columns = kHidden, .eps = 1e-6f, .packs = packs};
  ISOBIT_ASSIGN_OR_RETURN(args.x, op.Add<Bf16>(kRows * kHidden, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.weight, op.Add<Bf16>(kHidden, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.dy, op.Add<Bf16>(kRows * kHidden, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.dx, op.Add<Bf16>(kRows * kHidden));
  ISOBIT_ASSIGN_OR_RETURN(args.dw, op.Add<float>(kHidden));
  ISOBIT_ASSIGN_OR_RETURN(op.call, WithScratch(args));
  return op;
}

absl::StatusOr<Op> SwiGluOp() {
  Op op{.name = "SwiGLU gradient", .bytes = 10.0 * kRows * kIntermediate, .target = kTarget};
  SwiGluGradientArgs args = {.rows = kRows, .columns = kIntermediate};
  ISOBIT_ASSIGN_OR_RETURN(args.gate_up, op.Add<Bf16>(2 * kRows * kIntermediate, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.ds, op.Add<Bf16>(kRows * kIntermediate, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.dgate_up, op.Add<Bf16>(2 * kRows * kIntermediate));
  op.call = [args](const cuda::Stream& stream) { return cuda::Run(args, stream); };
  return op;
}

// The forward op, with its results, in *op.
absl::StatusOr<TrainingQkvArgs> AddHeads(bool norms, Op* op) {
  TrainingQkvArgs args = {
      .rows = kRows, .heads = kHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim, .eps = 1e-6f};
  std::vector<int32_t> positions;
  for (int64_t r = 0; r < kRows; ++r) positions.push_back(static_cast<int32_t>(r % kPositions));
  ISOBIT_ASSIGN_OR_RETURN(args.positions, op->AddCopy(positions));
  ISOBIT_ASSIGN_OR_RETURN(args.qkv, op->Add<Bf16>(kRows * kQkv, 1.0f));
  if (norms) {
    ISOBIT_ASSIGN_OR_RETURN(args.q_norm, op->Add<Bf16>(kHeadDim, 1.0f));
    args.k_norm = args.q_norm;
  }
  ISOBIT_ASSIGN_OR_RETURN(args.cosine, op->Add<float>(kPositions * kHeadDim / 2, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.sine, op->Add<float>(kPositions * kHeadDim / 2, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.q, op->Add<Bf16>(kRows * kHeads * kHeadDim, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.k, op->Add<Bf16>(kRows * kKvHeads * kHeadDim, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.v, op->Add<Bf16>(kRows * kKvHeads * kHeadDim, 1.0f));
  return args;
}

absl::StatusOr<Op> QkvOp() {
  Op op{.name = "q/k norm + RoPE", .bytes = 4.0 * kRows * kQkv, .target = kTarget};
  ISOBIT_ASSIGN_OR_RETURN(const TrainingQkvArgs args, AddHeads(true, &op));
  op.call = [args](const cuda::Stream& stream) { return cuda::Run(args, stream); };
  return op;
}

absl::StatusOr<Op> QkvGradientOp(bool norms) {
  const double read_again = norms ? 2.0 * (kHeads + kKvHeads) * kHeadDim : 0.0;
  Op op{.name = norms ? "q/k norm + RoPE gradient" : "RoPE gradient",
        .bytes = kRows * (4.0 * kQkv + read_again),
        .target = kTarget};
  QkvGradientArgs args;
  args.packs = kEightPacks;
  ISOBIT_ASSIGN_OR_RETURN(args.forward, AddHeads(norms, &op));
  args.dq = args.forward.q;
  args.dk = args.forward.k;
  args.dv = args.forward.v;
  ISOBIT_ASSIGN_OR_RETURN(args.dqkv, op.Add<Bf16>(kRows * kQkv));
  if (norms) {
    ISOBIT_ASSIGN_OR_RETURN(args.dq_norm, op.Add<float>(kHeadDim));
    ISOBIT_ASSIGN_OR_RETURN(args.dk_norm, op.Add<float>(kHeadDim));
  }
  ISOBIT_ASSIGN_OR_RETURN(op.call, WithScratch(args));
  return op;
}

// Ids as in text: the n-th most frequent one occurs about 1/n as often as the first.
absl::StatusOr<Op> EmbeddingOp() {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> uniform;
  std::vector<std::vector<int32_t>> rows_of(kVocab);
  for (int32_t r = 0; r < kRows; ++r) {
    const auto id = static_cast<size_t>(std::pow(kVocab, uniform(random))) - 1;
    rows_of[std::min<size_t>(id, kVocab - 1)].push_back(r);
  }
  std::vector<int32_t> ids;
  std::vector<int32_t> starts = {0};
  std::vector<int32_t> rows;
  for (int32_t id = 0; id < kVocab; ++id) {
    const std::vector<int32_t>& of_id = rows_of[static_cast<size_t>(id)];
    if (of_id.empty()) continue;
    ids.push_back(id);
    rows.insert(rows.end(), of_id.begin(), of_id.end());
    starts.push_back(static_cast<int32_t>(rows.size()));
  }
  const auto num_ids = static_cast<int64_t>(ids.size());
  Op op{.name = absl::StrCat("embedding gradient, ids: ", num_ids),
        .bytes = kHidden * (2.0 * kRows + 4.0 * static_cast<double>(num_ids))};
  EmbeddingGradientArgs args;
  args.hidden = kHidden;
  args.packs = kEightPacks;
  args.table.num_ids = num_ids;
  ISOBIT_ASSIGN_OR_RETURN(args.dy, op.Add<Bf16>(kRows * kHidden, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.table.ids, op.AddCopy(ids));
  ISOBIT_ASSIGN_OR_RETURN(args.table.starts, op.AddCopy(starts));
  ISOBIT_ASSIGN_OR_RETURN(args.table.rows, op.AddCopy(rows));
  ISOBIT_ASSIGN_OR_RETURN(args.dtable, op.Add<float>(kVocab * kHidden));
  op.call = [args](const cuda::Stream& stream) { return cuda::Run(args, stream); };
  return op;
}

// How the rows of the logprob ops are drawn.
struct Sampling {
  const char* name;
  float temperature;  // 0: raw
  int32_t top_k;      // 0: no filters
  float top_p;
};

absl::StatusOr<Op> LogProbOp(const Sampling& kind, bool gradient) {
  const double rows = kLogitRows;
  Op op{
      .name = absl::StrCat(gradient ? "logprob gradient, " : "logprobs and entropies, ", kind.name),
      .bytes = rows * kVocab * (gradient ? 6.0 : 4.0),
      .target = kind.top_k == 0 || gradient ? kTarget : 0};
  TrainingLogProbsArgs args;
  args.rows = kLogitRows;
  args.vocab = kVocab;
  ISOBIT_ASSIGN_OR_RETURN(args.logits, op.Add<float>(kLogitRows * kVocab, 2.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.targets, op.AddCopy(std::vector<int32_t>(kLogitRows, 17)));
  if (kind.temperature != 0) {
    ISOBIT_ASSIGN_OR_RETURN(args.sampling.temperature,
                            op.AddCopy(std::vector<float>(kLogitRows, kind.temperature)));
  }
  if (kind.top_k != 0) {
    ISOBIT_ASSIGN_OR_RETURN(args.sampling.top_k,
                            op.AddCopy(std::vector<int32_t>(kLogitRows, kind.top_k)));
    ISOBIT_ASSIGN_OR_RETURN(args.sampling.top_p,
                            op.AddCopy(std::vector<float>(kLogitRows, kind.top_p)));
  }
  ISOBIT_ASSIGN_OR_RETURN(args.logprobs, op.Add<float>(kLogitRows));
  ISOBIT_ASSIGN_OR_RETURN(args.entropies, op.Add<float>(kLogitRows));
  ISOBIT_ASSIGN_OR_RETURN(args.state, op.Add<LogProbRow>(kLogitRows));
  ISOBIT_ASSIGN_OR_RETURN(op.call, WithScratch(args));
  if (!gradient) return op;
  ISOBIT_ASSIGN_OR_RETURN(const cuda::Card card, cuda::GetCard(0));
  ISOBIT_RETURN_IF_ERROR(op.call({.dependent = false, .card = &card}));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  LogProbGradientArgs backward;
  backward.logits = args.logits;
  backward.rows = kLogitRows;
  backward.vocab = kVocab;
  backward.targets = args.targets;
  backward.sampling = args.sampling;
  backward.state = args.state;
  ISOBIT_ASSIGN_OR_RETURN(backward.dlogprobs, op.Add<float>(kLogitRows, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(backward.dlogits, op.Add<Bf16>(kLogitRows * kVocab));
  op.call = [backward](const cuda::Stream& stream) { return cuda::Run(backward, stream); };
  return op;
}

absl::StatusOr<Op> PolicyLossOp() {
  Op op{.name = "clipped loss, k3", .bytes = 28.0 * kRows};
  PolicyLossArgs args = {.tokens = kRows};
  for (const float** in : {&args.logprobs, &args.advantages, &args.weights, &args.old_logprobs,
                           &args.reference_logprobs}) {
    ISOBIT_ASSIGN_OR_RETURN(*in, op.Add<float>(kRows, 1.0f));
  }
  ISOBIT_ASSIGN_OR_RETURN(args.values, op.Add<float>(kRows));
  ISOBIT_ASSIGN_OR_RETURN(args.gradients, op.Add<float>(kRows));
  op.call = [args](const cuda::Stream& stream) { return cuda::Run(args, stream); };
  return op;
}

absl::StatusOr<Op> SquareSumsOp(int64_t columns, int64_t count) {
  const int64_t rows = count / columns;
  Op op{.name = absl::StrCat("sums of squares, columns: ", columns),
        .bytes = 4.0 * static_cast<double>(count) + 8.0 * static_cast<double>(rows),
        .target = columns > 1 ? kTarget : 0};
  SquareSumsArgs args = {.rows = rows, .columns = columns};
  ISOBIT_ASSIGN_OR_RETURN(args.x, op.Add<float>(count, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.sums, op.Add<double>(args.rows));
  op.call = [args](const cuda::Stream& stream) { return cuda::Run(args, stream); };
  return op;
}

absl::StatusOr<Op> TreeSum64Op(int64_t count) {
  Op op{.name = absl::StrCat("tree of float64, values: ", count),
        .bytes = 8.0 * static_cast<double>(count)};
  TreeSum64Args args = {.count = count};
  ISOBIT_ASSIGN_OR_RETURN(args.x, op.Add<double>(count));
  ISOBIT_ASSIGN_OR_RETURN(args.sum, op.Add<double>(1));
  ISOBIT_ASSIGN_OR_RETURN(op.call, WithScratch(args));
  return op;
}

absl::StatusOr<Op> AdamWOp() {
  Op op{.name = "AdamW", .bytes = 30.0 * kParameters, .target = kTarget};
  AdamWArgs args = {.count = kParameters,
                    .step = {.keep = 1.0f - 1e-7f,
                             .beta1 = 0.9f,
                             .one_minus_beta1 = 0.1f,
                             .beta2 = 0.95f,
                             .one_minus_beta2 = 0.05f,
                             .rate = 1e-6f,
                             .root_scale = 1.0f,
                             .eps = 1e-8f}};
  ISOBIT_ASSIGN_OR_RETURN(args.parameter, op.Add<float>(kParameters, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.m, op.Add<float>(kParameters, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.v, op.Add<float>(kParameters));
  ISOBIT_ASSIGN_OR_RETURN(args.gradient, op.Add<float>(kParameters, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(args.working, op.Add<Bf16>(kParameters));
  op.call = [args](const cuda::Stream& stream) { return cuda::Run(args, stream); };
  return op;
}

constexpr Sampling kSamplings[] = {{"raw", 0.0f, 0, 1.0f},
                                   {"temperature 0.7", 0.7f, 0, 1.0f},
                                   {"top-k 50, top-p 0.95", 1.0f, 50, 0.95f}};

}  // namespace

absl::Status BenchRows(Harness& harness, nlohmann::json& report) {
  std::vector<std::function<absl::StatusOr<Op>()>> ops = {ColumnSumsOp,
                                                          [] { return NormOp(kEightPacks); },
                                                          [] { return NormOp(kOnePack); },
                                                          SwiGluOp,
                                                          QkvOp,
                                                          [] { return QkvGradientOp(true); },
                                                          [] { return QkvGradientOp(false); },
                                                          EmbeddingOp};
  for (const bool gradient : {false, true}) {
    for (const Sampling& kind : kSamplings) {
      ops.emplace_back([&kind, gradient] { return LogProbOp(kind, gradient); });
    }
  }
  ops.emplace_back(PolicyLossOp);
  for (const int64_t columns : {kHidden, kIntermediate, int64_t{1}}) {
    ops.emplace_back(
        [columns] { return SquareSumsOp(columns, columns == 1 ? kNorms : kParameters); });
  }
  ops.emplace_back([] { return TreeSum64Op(kNorms); });
  ops.emplace_back(AdamWOp);

  absl::PrintF(
      "\nRow ops of training at Qwen3-8B's sizes (%d rows, %d of logits): graph replay, median of "
      "%d "
      "rounds.\nGB/s of the bytes a call must move, beside the copy rate.\n\n%-46s %10s %9s %7s "
      "%8s\n",
      kRows, kLogitRows, PlanOfFlags().rounds, "op", "us", "MB", "GB/s", "of copy");
  int below = 0;
  for (const auto& make : ops) {
    ISOBIT_ASSIGN_OR_RETURN(const Op op, make());
    const Contender contender = {
        .dependent = false,
        .call = [&op](int64_t, const cuda::Stream& stream) { return op.call(stream); }};
    ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times, harness.Race({&contender, 1}, 4, PlanOfFlags()));
    const double us = Median(times[0]);
    const double share = harness.Roofline(op.bytes, 0) / us;
    const bool missed = share < op.target;
    below += missed ? 1 : 0;
    absl::PrintF("%-46s %10.2f %9.2f %7.0f %6.0f%%%s\n", op.name, us, op.bytes / 1e6,
                 op.bytes / us / 1e3, 100 * share, missed ? " !" : "");
    std::fflush(stdout);
    report["rows"].push_back({{"op", op.name},
                              {"us", us},
                              {"bytes", op.bytes},
                              {"share_of_copy", share},
                              {"target", op.target}});
  }
  absl::PrintF("\ntarget: %.0f%% of the copy rate for large arrays; below: %d\n", 100 * kTarget,
               below);
  return absl::OkStatus();
}

}  // namespace isobit::bench
