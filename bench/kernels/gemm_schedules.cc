// Which schedules are worth measuring for a number of rows, and the sweep over them.
#include "bench/kernels/gemm_schedules.h"

#include <cstdio>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/sm90/linear/linear.h"
#include "nlohmann/json.hpp"

namespace isobit::bench {
namespace {

// The schedules that may be the fastest for m rows.
std::vector<cuda::LinearSchedule> Candidates(const cuda::Card& card, const LinearShape& shape,
                                             int64_t m) {
  using Kind = cuda::LinearSchedule::Kind;
  std::vector<cuda::LinearSchedule> all = {cuda::ChooseLinear(card, shape, m, true)};
  for (const cuda::TileSchedule& tile : cuda::TileSchedules(shape)) {
    if (m <= 64 || tile.rows > 64) all.push_back({.kind = Kind::kTile, .tile = tile});
  }
  const int columns = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64;
  for (int leaves = 1; m <= 64 && leaves <= shape.num_leaves; leaves *= 2) {
    const bool whole = leaves == shape.num_leaves;
    for (const int rows : {16, 32, 48, 64, 80, 96, 128}) {
      for (const int stages : {3, 4, 6, 8}) {
        if (!whole && rows != 64) continue;
        all.push_back({.kind = Kind::kStream,
                       .stream = {.columns = columns,
                                  .rows = rows,
                                  .leaves = leaves,
                                  .stages = stages,
                                  .blocks = whole ? static_cast<int>(card.multiprocessors) : 0}});
      }
    }
  }
  std::erase_if(all, [&](const cuda::LinearSchedule& schedule) {
    return !cuda::CheckSchedule(schedule, shape, true).ok();
  });
  return all;
}

}  // namespace

absl::Status SweepSchedules(Harness& harness, const Calls& calls) {
  const Layer& layer = calls.layer;
  std::vector<Contender> contenders = {calls.Cublas(harness, BaselineOutput(layer))};
  const std::vector<cuda::LinearSchedule> candidates =
      Candidates(harness.card(), layer.shape, calls.m);
  for (const cuda::LinearSchedule& schedule : candidates) {
    contenders.push_back({.call = [&](int64_t i, const cuda::Stream& stream) {
      return cuda::LaunchLinearAs(schedule, calls.Args(i, layer.output), stream);
    }});
  }
  ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times,
                          harness.Race(contenders, calls.count, {.rounds = 3, .slot_us = 0}));
  nlohmann::json line = {{"model", layer.model},
                         {"tp", layer.tp},
                         {"layer", layer.name},
                         {"n", layer.shape.n},
                         {"k", layer.shape.k},
                         {"leaves", layer.shape.num_leaves},
                         {"tree", layer.shape.sum == contract::LeafSum::kTree},
                         {"m", calls.m},
                         {"cublas_us", Median(times[0])},
                         {"chosen", cuda::Describe(candidates[0])}};
  for (size_t i = 0; i < candidates.size(); ++i) {
    line["us"][cuda::Describe(candidates[i])] = Median(times[i + 1]);
  }
  absl::PrintF("%s\n", line.dump());
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace isobit::bench
