// Row-parallel linear layers that push their partials, compared with the same layers storing them:
// the sum over ranks and its norm have the same bits.
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/system_memory.cuh"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/linear.h"
#include "kernels/cuda/sm90/linear/schedule.h"
#include "tests/kernels/cuda/collective/rank_case.cuh"
#include "tests/kernels/cuda/row_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::Operands;
using testing_support::SameBits;
using testing_support::Scaled;
using testing_support::View;

constexpr int64_t kMaxRows = 513;

LinearShape ShapeOfRank(int64_t n, const contract::LeafPlan& plan, int rank, int size) {
  const contract::LeafRange leaves = contract::LeavesOfRank(rank, size);
  LinearShape shape = {
      .n = n, .num_leaves = leaves.end - leaves.begin, .sum = contract::LeafSum::kTree};
  const auto bound = [&](int l) { return plan.bounds[static_cast<size_t>(leaves.begin + l)]; };
  for (int l = 0; l <= shape.num_leaves; ++l) shape.bounds[l] = bound(l) - bound(0);
  shape.k = shape.bounds[shape.num_leaves];
  return shape;
}

// One rank's share of a row-parallel layer [n, k] and of the norm after it, with their memory.
struct Layer {
  // gap: elements between the rows of x; with an odd gap the general kernel computes the layer.
  Layer(const LinearShape& shape_of_rank, int64_t gap, const std::vector<Bf16>& norm_weight,
        Operands& operands)
      : shape(shape_of_rank),
        ldx(shape.k + gap),
        x(operands.Bf16s(kMaxRows * ldx, false)),
        packed(static_cast<int64_t>(PackedLinearBytes(shape))),
        partial(kMaxRows * shape.n),
        residual(kMaxRows * shape.n),
        out(kMaxRows * shape.n),
        weight(norm_weight) {
    std::vector<std::byte> bytes(PackedLinearBytes(shape));
    PackLinear(shape, operands.Bf16s(shape.n * shape.k, false).data(), shape.k, bytes.data());
    packed.CopyIn(bytes);
  }

  // schedule: null: the one that is chosen.
  absl::Status Multiply(int64_t m, const PartialPush* push, const LinearSchedule* schedule,
                        const Stream& stream) {
    const LinearArgs args = {.x = x.data(),
                             .ldx = ldx,
                             .m = m,
                             .weight = {shape, packed.data()},
                             .fp32_out = partial.data(),
                             .ldy = shape.n,
                             .push = push};
    return schedule == nullptr ? cuda::Run(args, stream) : LaunchLinearAs(*schedule, args, stream);
  }
  absl::Status Norm(PeerAllReduce& end, int64_t m, bool pushed, const Stream& stream) {
    return end.Norm(pushed ? nullptr : partial.data(),
                    {.residual = residual.data(),
                     .weight = weight.data(),
                     .out = out.data(),
                     .rows = m,
                     .hidden = shape.n,
                     .eps = 1e-6f},
                    stream);
  }

  LinearShape shape;
  int64_t ldx;
  DeviceBuffer<Bf16> x;
  DeviceBuffer<std::byte> packed;
  DeviceBuffer<float> partial;
  DeviceBuffer<Bf16> residual, out, weight;
};

// Delays a rank between its layer and its sum.
__global__ void ComeLate() {
  ReleaseSuccessor();
  WaitForPredecessor();
  for (const uint64_t begin = GlobalTimer(); GlobalTimer() - begin < 200000;) {
  }
}

class PartialPushTest : public testing_support::RowTest {
 protected:
  // `out` and `residual` of every rank after the layer and its norm have run four times.
  std::vector<std::vector<Bf16>> Run(Ranks& ranks, std::vector<std::unique_ptr<Layer>>& layers,
                                     const std::vector<Bf16>& residual, int64_t m, bool pushes,
                                     bool shared, const LinearSchedule* schedule = nullptr) {
    const bool dependent = Chance(2);
    ranks.Each([&](int r) {
      layers[r]->residual.CopyIn(residual);
      layers[r]->out.Poison();
      layers[r]->partial.Poison();
    });
    const auto stream = [&](int r) { return ranks.stream(r).WithDependent(dependent); };
    const auto norm = [&](int r) {
      ASSERT_TRUE(layers[r]->Norm(ranks.end(r), m, pushes, stream(r)).ok());
    };
    for (int i = 0; i < 4; ++i) {
      ranks.Each([&](int r) {
        const PartialPush* const push = pushes ? ranks.end(r).Push(m) : nullptr;
        ASSERT_EQ(push != nullptr, pushes);
        ASSERT_TRUE(layers[r]->Multiply(m, push, schedule, stream(r)).ok());
        if (shared) return;
        // Different ranks are late for the sum.
        if (r == i % ranks.size()) {
          ASSERT_TRUE(Launch(ComeLate, {.blocks = dim3(1), .threads = dim3(1)}, stream(r)).ok());
        }
        norm(r);
      });
      // On a shared GPU a sum may hold the multiprocessors that a peer's clusters need.
      if (!shared) continue;
      ranks.Synchronize();
      ranks.Each(norm);
      ranks.Synchronize();
    }
    ranks.Synchronize();
    ranks.ExpectOk();
    std::vector<std::vector<Bf16>> results;
    ranks.Each([&](int r) {
      EXPECT_TRUE(layers[r]->partial.GuardsIntact());
      results.push_back(layers[r]->out.CopyOut());
      const std::vector<Bf16> h = layers[r]->residual.CopyOut();
      results.back().insert(results.back().end(), h.begin(), h.end());
    });
    return results;
  }
};

// The schedules that are chosen: leaves of one to many K tiles, an x that only the general kernel
// takes, columns that are no whole quads.
TEST_F(PartialPushTest, GivesTheBitsOfStoredPartials) {
  int cases = 0;
  for (const int size : {2, 4, 8}) {
    for (const std::vector<int>& devices : Placements(size)) {
      const bool shared = std::set<int>(devices.begin(), devices.end()).size() < devices.size();
      for (const int64_t n : {998, 1536, 4096}) {
        // Slow links make a layer choose tiles that end sooner.
        const PushOptions push = {.rows = kMaxRows, .bytes_per_us = Chance(2) ? 1e4 : 0.0};
        Ranks ranks(devices, {.hidden = n, .push = push, .timeout = kRankTimeout});
        const std::vector<Bf16> residual = operands_.Bf16s(kMaxRows * n, false);
        const std::vector<Bf16> weight = operands_.Bf16s(n, false);
        for (const int64_t k : {1000, 1024, 4096}) {
          const contract::LeafPlan plan = contract::PlanColumns(k);
          std::vector<std::unique_ptr<Layer>> layers;
          ranks.Each([&](int r) {
            layers.push_back(std::make_unique<Layer>(ShapeOfRank(n, plan, r, size),
                                                     k == 1000 ? 1 : 0, weight, operands_));
          });
          for (const int64_t m :
               {1, 5, 8, 9, 16, 17, 33, 48, 63, 64, 65, 96, 127, 128, 256, 511, 512, 513}) {
            if (Below(100) >= Scaled(100)) continue;
            SCOPED_TRACE(
                absl::StrCat("m ", m, ", n ", n, ", k ", k, " on ", absl::StrJoin(devices, ",")));
            const auto expected = Run(ranks, layers, residual, m, /*pushes=*/false, shared);
            const auto actual = Run(ranks, layers, residual, m, /*pushes=*/true, shared);
            for (size_t r = 0; r < actual.size(); ++r) {
              EXPECT_TRUE(SameBits(View(actual[r]), View(expected[r]))) << "rank " << r;
            }
            if (HasFailure()) return;
            ++cases;
          }
        }
      }
    }
  }
  std::printf("Linear layers that push: %d cases\n", cases);
}

// Every tile: a last one that lacks rows and columns, in one shot and in two.
TEST_F(PartialPushTest, EveryTileGivesTheBitsOfStoredPartials) {
  int cases = 0;
  for (const int size : {2, 4, 8}) {
    const std::vector<int> devices = Placements(size).back();
    const bool shared = std::set<int>(devices.begin(), devices.end()).size() < devices.size();
    for (const int64_t n : {100, 1000}) {
      Ranks ranks(devices, {.hidden = n, .push = {.rows = kMaxRows}, .timeout = kRankTimeout});
      const std::vector<Bf16> residual = operands_.Bf16s(kMaxRows * n, false);
      const std::vector<Bf16> weight = operands_.Bf16s(n, false);
      const contract::LeafPlan plan = contract::PlanColumns(2048);
      std::vector<std::unique_ptr<Layer>> layers;
      ranks.Each([&](int r) {
        layers.push_back(
            std::make_unique<Layer>(ShapeOfRank(n, plan, r, size), 0, weight, operands_));
      });
      const std::vector<TileSchedule> tiles = TileSchedules(layers[0]->shape);
      ASSERT_FALSE(tiles.empty());
      for (const TileSchedule& tile : tiles) {
        const LinearSchedule schedule = {.kind = LinearSchedule::Kind::kTile, .tile = tile};
        for (const int64_t m : {67, 263}) {
          SCOPED_TRACE(absl::StrCat(Describe(schedule), ", m ", m, ", n ", n, " on ",
                                    absl::StrJoin(devices, ",")));
          const auto expected = Run(ranks, layers, residual, m, false, shared, &schedule);
          const auto actual = Run(ranks, layers, residual, m, true, shared, &schedule);
          for (size_t r = 0; r < actual.size(); ++r) {
            EXPECT_TRUE(SameBits(View(actual[r]), View(expected[r]))) << "rank " << r;
          }
          if (HasFailure()) return;
          ++cases;
        }
      }
    }
  }
  std::printf("Tiles that push: %d cases\n", cases);
}

}  // namespace
}  // namespace isobit::cuda
