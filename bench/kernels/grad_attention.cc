// Attention of training and its gradient, beside the rate of cuBLAS's products.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/grad.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/contract/attention.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/attention/training.h"

namespace isobit::bench {
namespace {

struct Case {
  int32_t sequences;
  int32_t length;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;

  int64_t rows() const { return int64_t{sequences} * length; }
  // Floating-point operations of so many products, counting only keys that a row sees.
  double Operations(int products) const {
    const double seen = 0.5 * static_cast<double>(length) * static_cast<double>(length + 1);
    return 2.0 * products * seen * sequences * heads * head_dim;
  }
};
constexpr Case kCases[] = {{2, 8192, 32, 8, 128}, {1, 16384, 32, 8, 128}, {16, 1024, 32, 8, 128},
                           {2, 8192, 64, 8, 128}, {2, 8192, 16, 8, 128},  {2, 8192, 32, 8, 64},
                           {2, 8192, 32, 8, 96},  {2, 8192, 16, 4, 256}};
// Products of a tile of queries and keys: S and O; S again, dP, dV, dK and dQ.
constexpr int kForward = 2;
constexpr int kBackward = 5;

// A case's tensors.
class Problem {
 public:
  static absl::StatusOr<Problem> Create(const cuda::Card& card, const Case& c) {
    Problem p;
    p.bounds_.resize(static_cast<size_t>(c.sequences) + 1);
    for (size_t i = 0; i < p.bounds_.size(); ++i) {
      p.bounds_[i] = static_cast<int32_t>(i) * c.length;
    }
    const size_t wide = static_cast<size_t>(c.rows() * c.heads * c.head_dim) * sizeof(Bf16);
    const size_t narrow = wide / static_cast<size_t>(c.heads / c.kv_heads);
    TrainingAttentionArgs& f = p.args_.forward;
    f.rows = c.rows();
    f.heads = c.heads;
    f.kv_heads = c.kv_heads;
    f.head_dim = c.head_dim;
    f.scale = contract::AttentionScale(c.head_dim);
    ISOBIT_ASSIGN_OR_RETURN(f.q, p.Random(wide));
    ISOBIT_ASSIGN_OR_RETURN(f.k, p.Random(narrow));
    ISOBIT_ASSIGN_OR_RETURN(f.v, p.Random(narrow));
    ISOBIT_ASSIGN_OR_RETURN(f.out, p.Random(wide));
    ISOBIT_ASSIGN_OR_RETURN(p.args_.dout, p.Random(wide));
    ISOBIT_ASSIGN_OR_RETURN(p.args_.dq, p.Random(wide));
    ISOBIT_ASSIGN_OR_RETURN(p.args_.dk, p.Random(narrow));
    ISOBIT_ASSIGN_OR_RETURN(p.args_.dv, p.Random(narrow));
    ISOBIT_ASSIGN_OR_RETURN(std::byte* const log_sums,
                            p.Add(static_cast<size_t>(c.rows() * c.heads) * sizeof(float)));
    f.log_sums = reinterpret_cast<float*>(log_sums);
    const size_t bound_bytes = p.bounds_.size() * sizeof(int32_t);
    ISOBIT_ASSIGN_OR_RETURN(std::byte* const bounds, p.Add(bound_bytes));
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(bounds, p.bounds_.data(), bound_bytes, cudaMemcpyHostToDevice));
    f.sequences = {p.bounds_, reinterpret_cast<const int32_t*>(bounds)};
    const size_t scratch_bytes = cuda::AttentionGradientWorkspaceBytes(card, p.args_);
    ISOBIT_ASSIGN_OR_RETURN(std::byte* const scratch, p.Add(scratch_bytes));
    p.workspace_ = {scratch, scratch_bytes};
    return p;
  }

  absl::Status Forward(const cuda::Stream& stream) const {
    return cuda::Run(args_.forward, stream);
  }
  absl::Status Backward(const cuda::Stream& stream) const {
    return cuda::LaunchAttentionGradient(args_, workspace_, stream);
  }

 private:
  absl::StatusOr<std::byte*> Add(size_t bytes) {
    ISOBIT_ASSIGN_OR_RETURN(DeviceMemory memory, AllocateDevice(bytes));
    return memory_.emplace_back(std::move(memory)).get();
  }
  absl::StatusOr<Bf16*> Random(size_t bytes) {
    const auto seed = static_cast<uint32_t>(memory_.size());
    ISOBIT_ASSIGN_OR_RETURN(DeviceMemory memory, RandomBf16(bytes, seed, 1.0f));
    return reinterpret_cast<Bf16*>(memory_.emplace_back(std::move(memory)).get());
  }

  std::vector<DeviceMemory> memory_;
  std::vector<int32_t> bounds_;
  AttentionGradientArgs args_;
  absl::Span<std::byte> workspace_;
};

}  // namespace

absl::Status BenchTrainingAttention(Harness& harness, nlohmann::json& report) {
  absl::PrintF(
      "\nAttention of training: graph replay, median of %d rounds. TFLOP/s of %d products in the "
      "forward pass\nand %d in the backward pass, and their share of cuBLAS's rate.\n\n"
      "%-24s %9s %7s %10s %9s %7s %10s\n",
      PlanOfFlags().rounds, kForward, kBackward, "rows, heads, head_dim", "fwd us", "TF/s",
      "of cuBLAS", "bwd us", "TF/s", "of cuBLAS");
  for (const Case& c : kCases) {
    ISOBIT_ASSIGN_OR_RETURN(const Problem problem, Problem::Create(harness.card(), c));
    const Contender contenders[] = {
        {.dependent = false,
         .call = [&](int64_t, const cuda::Stream& stream) { return problem.Forward(stream); }},
        {.dependent = false,
         .call = [&](int64_t, const cuda::Stream& stream) { return problem.Backward(stream); }}};
    ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times, harness.Race(contenders, 1, PlanOfFlags()));
    nlohmann::json entry = {{"sequences", c.sequences},
                            {"length", c.length},
                            {"heads", c.heads},
                            {"kv_heads", c.kv_heads},
                            {"head_dim", c.head_dim}};
    absl::PrintF("%-24s", absl::StrCat(c.sequences, " x ", c.length, ", ", c.heads, "/", c.kv_heads,
                                       ", ", c.head_dim));
    for (const bool backward : {false, true}) {
      const double us = Median(times[backward ? 1 : 0]);
      const double operations = c.Operations(backward ? kBackward : kForward);
      const double share = harness.Roofline(0, operations) / us;
      absl::PrintF(" %9.1f %7.0f %9.0f%%", us, operations / us / 1e6, 100 * share);
      const std::string pass = backward ? "backward" : "forward";
      entry[pass + "_us"] = us;
      entry[pass + "_tflop_per_s"] = operations / us / 1e6;
      entry[pass + "_share_of_cublas"] = share;
    }
    absl::PrintF("\n");
    std::fflush(stdout);
    report["attention"].push_back(std::move(entry));
  }
  return absl::OkStatus();
}

}  // namespace isobit::bench
