// Row-parallel layers that store their partial sums, beside those that push them to the ranks.
#include "bench/kernels/push.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/gpu.h"
#include "bench/kernels/harness.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "kernels/cuda/sm90/device/card.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/linear.h"
#include "kernels/cuda/sm90/linear/schedule.h"

ABSL_FLAG(std::vector<std::string>, push_rows,
          std::vector<std::string>({"64", "96", "128", "192", "256", "384", "512"}),
          "allreduce: rows of the layers that are measured with their sums");
ABSL_FLAG(double, push_gb, 330,
          "allreduce: GB/s that a rank is expected to push, by which the layers choose tiles");

namespace isobit::bench {
namespace {

constexpr int64_t kHidden = 4096;
constexpr int64_t kMostRows = 4096;
constexpr int64_t kCopies = 8;  // of a layer's weights, used in turn: more than the L2 holds

// A layer of `columns` columns on rank 0; the other ranks' shapes are the same.
LinearShape ShapeOf(int64_t columns, int ranks) {
  const contract::LeafPlan plan = contract::PlanColumns(columns);
  LinearShape shape = {
      .n = kHidden, .num_leaves = contract::kLeaves / ranks, .sum = contract::LeafSum::kTree};
  for (int l = 0; l <= shape.num_leaves; ++l) shape.bounds[l] = plan.bounds[static_cast<size_t>(l)];
  shape.k = shape.bounds[shape.num_leaves];
  return shape;
}

// A layer of each rank and what its sum needs.
class LayerAndSum {
 public:
  static absl::StatusOr<std::unique_ptr<LayerAndSum>> Create(RankTeam& team, int64_t columns,
                                                             int64_t most_rows) {
    std::unique_ptr<LayerAndSum> layer(new LayerAndSum(team, ShapeOf(columns, team.size())));
    const auto rows = static_cast<size_t>(most_rows);
    const auto k = static_cast<size_t>(layer->shape_.k);
    ISOBIT_RETURN_IF_ERROR(team.Each([&](int r) {
      Rank& rank = layer->ranks_.emplace_back();
      const auto seed = static_cast<uint32_t>(10 * r);
      const size_t bytes = static_cast<size_t>(kCopies) * layer->weight_bytes_;
      ISOBIT_ASSIGN_OR_RETURN(rank.weights, RandomBf16(bytes, seed, 0.1f));
      ISOBIT_ASSIGN_OR_RETURN(rank.x, RandomBf16(rows * k * 2, seed + 1, 0.1f));
      ISOBIT_ASSIGN_OR_RETURN(rank.partial[0], AllocateDevice(rows * kHidden * 4));
      ISOBIT_ASSIGN_OR_RETURN(rank.partial[1], AllocateDevice(rows * kHidden * 4));
      ISOBIT_ASSIGN_OR_RETURN(rank.residual, RandomBf16(rows * kHidden * 2, 5, 1.0f));
      ISOBIT_ASSIGN_OR_RETURN(rank.out, AllocateDevice(rows * kHidden * 2));
      ISOBIT_ASSIGN_OR_RETURN(rank.norm_weight, RandomBf16(kHidden * 2, 6, 1.0f));
      return absl::OkStatus();
    }));
    return layer;
  }

  const LinearShape& shape() const { return shape_; }

  using Ends = std::vector<std::unique_ptr<cuda::PeerAllReduce>>;
  // Call i of the layer and its sum on all ranks. Partial sums are pushed if `ends` says so.
  absl::Status Run(Ends& ends, int64_t rows, int64_t i, absl::Span<const cuda::Stream> streams) {
    return team_.Each([&](int r) {
      const auto index = static_cast<size_t>(r);
      const Rank& rank = ranks_[index];
      const PartialPush* const push = ends[index]->Push(rows);
      auto* const partial = reinterpret_cast<float*>(rank.partial[i % 2].get());
      const LinearArgs args = {
          .x = reinterpret_cast<const Bf16*>(rank.x.get()),
          .ldx = shape_.k,
          .m = rows,
          .weight = {shape_, rank.weights.get() + static_cast<size_t>(i % kCopies) * weight_bytes_},
          .fp32_out = partial,
          .ldy = kHidden,
          .push = push};
      ISOBIT_RETURN_IF_ERROR(cuda::Run(args, streams[index]));
      return ends[index]->Norm(push != nullptr ? nullptr : partial,
                               {.residual = reinterpret_cast<Bf16*>(rank.residual.get()),
                                .weight = reinterpret_cast<const Bf16*>(rank.norm_weight.get()),
                                .out = reinterpret_cast<Bf16*>(rank.out.get()),
                                .rows = rows,
                                .hidden = kHidden,
                                .eps = 1e-6f},
                               streams[index]);
    });
  }

 private:
  struct Rank {
    DeviceMemory weights, x, partial[2], residual, out, norm_weight;
  };

  LayerAndSum(RankTeam& team, const LinearShape& shape)
      : team_(team), shape_(shape), weight_bytes_(cuda::PackedLinearBytes(shape)) {}

  RankTeam& team_;
  const LinearShape shape_;
  const size_t weight_bytes_;
  std::vector<Rank> ranks_;
};

}  // namespace

absl::Status BenchPush(RankTeam& team, nlohmann::json& report) {
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> rows,
                          Numbers("push_rows", absl::GetFlag(FLAGS_push_rows), kMostRows));
  const double gb = absl::GetFlag(FLAGS_push_gb);
  if (!(gb > 0)) return absl::InvalidArgumentError("--push_gb: expected more than 0");
  const cuda::PushOptions options[] = {{.rows = 0},
                                       {.rows = kMostRows, .bytes_per_us = 0},
                                       {.rows = kMostRows, .bytes_per_us = gb * 1e3}};
  std::vector<LayerAndSum::Ends> ends;
  for (const cuda::PushOptions& push : options) {
    ISOBIT_ASSIGN_OR_RETURN(
        ends.emplace_back(),
        cuda::PeerAllReduce::Create(team.group(), {.hidden = kHidden, .push = push}));
  }
  absl::PrintF("\n%d ranks, layer and sum\n%6s %6s %10s %10s %14s %10s %10s  %s\n", team.size(),
               "layer", "rows", "stored us", "pushed us", "its tiles us", "pushed to", "tiles to",
               "tiles");
  for (const auto& [name, columns] : {std::pair{"o", 4096}, std::pair{"down", 12288}}) {
    ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<LayerAndSum> layer,
                            LayerAndSum::Create(team, columns, *std::ranges::max_element(rows)));
    for (const int64_t m : rows) {
      std::vector<RankContender> contenders;
      for (LayerAndSum::Ends& of : ends) {
        contenders.push_back({.call = [&](int64_t i, absl::Span<const cuda::Stream> streams) {
          return layer->Run(of, m, i, streams);
        }});
      }
      ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times, team.Race(contenders, 16, Quick() ? 5 : 31));
      for (const LayerAndSum::Ends& of : ends) {
        for (const auto& end : of) ISOBIT_RETURN_IF_ERROR(end->Check());
      }
      const double sent = static_cast<double>(m * kHidden * 4) * (1 - 1.0 / team.size());
      const auto tiles = [&](double us) {
        return cuda::Describe(cuda::ChooseLinear(team.card(), layer->shape(), m, true, us));
      };
      const double us[] = {Median(times[0]), Median(times[1]), Median(times[2])};
      absl::PrintF("%6s %6d %10.2f %10.2f %14.2f %10.3f %10.3f  %s; %s\n", name, m, us[0], us[1],
                   us[2], us[1] / us[0], us[2] / us[0], tiles(0), tiles(sent / (gb * 1e3)));
      std::fflush(stdout);
      report["push"].push_back({{"ranks", team.size()},
                                {"layer", name},
                                {"rows", m},
                                {"stored_us", us[0]},
                                {"pushed_us", us[1]},
                                {"tiles_us", us[2]}});
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit::bench
