// The schedule table is total and valid: every layer of every model gets a schedule that can
// compute it.
#include "kernels/cuda/sm90/linear/schedule.h"

#include <algorithm>

#include "common/base/round_up.h"
#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/sm90/device/card.h"
#include "kernels/cuda/sm90/device/shared_memory.h"
#include "kernels/cuda/sm90/linear/stream_plan.h"

namespace isobit::cuda {
namespace {

using contract::LeafSum;

LinearShape ShapeOf(int64_t n, const contract::LeafPlan& plan, int size, LeafSum sum) {
  LinearShape shape{.n = n, .num_leaves = contract::kLeaves / size, .sum = sum};
  std::copy_n(plan.bounds.begin(), shape.num_leaves + 1, shape.bounds);
  shape.k = shape.bounds[shape.num_leaves];
  return shape;
}

TEST(CardTest, IsTheMeasuredOneOrAShareOfIt) {
  EXPECT_EQ(CardWith(132), kH200);
  const Card half = CardWith(66);
  EXPECT_NE(half, kH200);
  EXPECT_EQ(half.multiprocessors, 66);
  EXPECT_EQ(half.ClustersAtOnce(1), 66);
  EXPECT_EQ(half.ClustersAtOnce(4), 15);
  EXPECT_EQ(CardWith(4).ClustersAtOnce(8), 1);
}

TEST(LinearScheduleTest, EveryChoiceIsValid) {
  for (const int64_t n : {1, 15, 64, 300, 768, 1024, 4096, 5120, 6144, 24576, 51200, 151936}) {
    for (const int64_t k : {1, 16, 100, 576, 1024, 4096, 12288, 25600}) {
      for (const int size : {1, 2, 4, 8}) {
        for (const LeafSum sum : {LeafSum::kChain, LeafSum::kTree}) {
          for (const bool gated : {false, true}) {
            LinearShape shape = ShapeOf(n + (gated ? n % 2 : 0), contract::PlanColumns(k),
                                        sum == LeafSum::kTree ? size : 1, sum);
            shape.gated = gated;
            for (const int64_t m : {1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 1000, 8192}) {
              const LinearSchedule schedule = ChooseLinear(kH200, shape, m, true);
              EXPECT_TRUE(CheckSchedule(schedule, shape, true).ok())
                  << Describe(schedule) << ", n " << n << ", k " << k << ", m " << m;
              EXPECT_EQ(schedule.kind == LinearSchedule::Kind::kGeneral, shape.k == 0);
            }
          }
        }
      }
    }
  }
}

// Blocks that have all leaves are one, two or three for each of the card's multiprocessors.
TEST(LinearScheduleTest, BlocksFollowTheCard) {
  const LinearShape shape = ShapeOf(24576, contract::PlanColumns(4096), 1, LeafSum::kChain);
  for (const Card& card : {kH200, CardWith(114)}) {
    for (const int64_t m : {1, 8, 16, 32}) {
      const LinearSchedule schedule = ChooseLinear(card, shape, m, true);
      ASSERT_EQ(schedule.kind, LinearSchedule::Kind::kStream);
      EXPECT_TRUE(CheckSchedule(schedule, shape, true).ok()) << Describe(schedule);
      EXPECT_GT(schedule.stream.blocks, 0) << Describe(schedule);
      EXPECT_EQ(schedule.stream.blocks % card.multiprocessors, 0) << Describe(schedule);
    }
  }
}

// An 8B model at TP 4, up to 8 rows. down_proj has no more blocks than there are multiprocessors;
// two of them do not fit on one. A block of gate_up_proj, the layer before, fits beside one of
// them.
TEST(LinearScheduleTest, LongPassesOfFewRowsSpreadBesideOthers) {
  LinearShape gate_up = ShapeOf(6144, contract::PlanColumns(4096), 1, LeafSum::kChain);
  gate_up.gated = true;
  const LinearShape down = ShapeOf(4096, contract::PlanColumns(12288), 4, LeafSum::kTree);
  for (const int64_t m : {1, 8}) {
    const LinearSchedule first = ChooseLinear(kH200, gate_up, m, true);
    const LinearSchedule second = ChooseLinear(kH200, down, m, true);
    ASSERT_EQ(first.kind, LinearSchedule::Kind::kStream);
    ASSERT_EQ(second.kind, LinearSchedule::Kind::kStream);
    const int64_t first_bytes = StreamSharedBytes(first.stream, gate_up) + kReservedSharedBytes;
    const int64_t second_bytes = StreamSharedBytes(second.stream, down) + kReservedSharedBytes;
    EXPECT_GT(2 * second_bytes, kMultiprocessorSharedBytes) << Describe(second);
    EXPECT_LE(first_bytes + second_bytes, kMultiprocessorSharedBytes)
        << Describe(first) << ", " << Describe(second);
  }
}

// An 8B model's down_proj at TP 4, 512 rows. Its sums take about as long to other ranks as the
// product: all of them should not leave at its end.
TEST(LinearScheduleTest, SumsThatTravelLeaveInSeveralWaves) {
  const LinearShape down = ShapeOf(4096, contract::PlanColumns(12288), 4, LeafSum::kTree);
  const auto tiles = [&](double push_us) {
    const TileSchedule tile = ChooseLinear(kH200, down, 512, true, push_us).tile;
    return 512 / tile.rows * CeilDiv(down.n, tile.columns);
  };
  EXPECT_LE(tiles(0), kH200.multiprocessors);
  EXPECT_GT(tiles(19), kH200.multiprocessors);
}

TEST(LinearScheduleTest, WhatHasNoTensorMapIsGeneral) {
  const LinearShape shape = ShapeOf(64, contract::PlanColumns(1024), 1, LeafSum::kChain);
  EXPECT_EQ(ChooseLinear(kH200, shape, 1, false).kind, LinearSchedule::Kind::kGeneral);
  EXPECT_FALSE(CheckSchedule(ChooseLinear(kH200, shape, 1, true), shape, false).ok());
}

TEST(LinearScheduleTest, LeavesThatEndInsideAStepAreGeneral) {
  const LinearShape ragged = ShapeOf(64, contract::PlanKvHeads(9, 24), 1, LeafSum::kTree);
  EXPECT_FALSE(WholeSteps(ragged));
  EXPECT_EQ(ChooseLinear(kH200, ragged, 1, true).kind, LinearSchedule::Kind::kGeneral);
  // Only the last leaf may be ragged: x reads as +0 beyond its columns.
  const LinearShape last = ShapeOf(64, contract::PlanColumns(1000), 1, LeafSum::kChain);
  EXPECT_TRUE(WholeSteps(last));
  EXPECT_EQ(ChooseLinear(kH200, last, 1, true).kind, LinearSchedule::Kind::kStream);
}

TEST(LinearScheduleTest, RefusesWhatCannotRun) {
  const LinearShape shape = ShapeOf(64, contract::PlanColumns(1024), 1, LeafSum::kChain);
  const LinearSchedule good = ChooseLinear(kH200, shape, 1, true);
  LinearSchedule bad = good;
  bad.stream.columns = 12;
  EXPECT_FALSE(CheckSchedule(bad, shape, true).ok());
  bad = good;
  bad.stream.rows = 24;
  EXPECT_FALSE(CheckSchedule(bad, shape, true).ok());
  bad = good;
  bad.stream.leaves = 3;
  EXPECT_FALSE(CheckSchedule(bad, shape, true).ok());
  bad = good;
  bad.stream.stages = 200;
  EXPECT_FALSE(CheckSchedule(bad, shape, true).ok());
}

}  // namespace
}  // namespace isobit::cuda
