// Which tiles the products of training take.
#include "kernels/cuda/sm90/linear/product_schedule.h"

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cuda/sm90/device/card.h"

namespace isobit::cuda {
namespace {

// Layers on 16,384 rows.
TEST(ProductScheduleTest, LayersOfAModel) {
  const auto chosen = [](const ProductShape& shape, absl::Span<const ProductSchedule> tiles) {
    return ChooseProduct(kH200, shape, tiles);
  };
  const ProductSchedule pairs = {.columns = 128, .cluster = 2};
  EXPECT_EQ(chosen({.row_tiles = 128, .columns = {4096, 1024, 1024}, .blocks = 64}, kChainTiles),
            pairs);
  // Equal waves: the cluster reads less.
  const ProductShape o = {.row_tiles = 128, .columns = {4096}, .blocks = 64};
  EXPECT_EQ(chosen(o, kTreeTiles), pairs);
  EXPECT_EQ(chosen(o, kInputGradientTiles), (ProductSchedule{.columns = 256, .cluster = 2}));
  // Blocks of the head have 4,096 rows: 178 waves of 208 columns are cheaper than 288 of 128.
  EXPECT_EQ(chosen({.row_tiles = 32, .columns = {151936}, .blocks = 64}, kChainTiles),
            (ProductSchedule{.columns = 208, .cluster = 2}));
}

// The more packs, the more of their sums should wait on the chip.
TEST(ProductScheduleTest, PacksTakeSmallerTiles) {
  ProductShape qkv = {.row_tiles = 48, .columns = {4096}, .blocks = 256};
  EXPECT_EQ(ChooseProduct(kH200, qkv, kWeightGradientTiles).columns, 256);
  qkv.packs = 8;
  EXPECT_EQ(ChooseProduct(kH200, qkv, kWeightGradientTiles).columns, 128);
}

// A gradient too small for the GPU is split over its packs, and never over more than there are.
TEST(ProductScheduleTest, SmallGradientsAreSplit) {
  ProductShape small = {.row_tiles = 2, .columns = {256}, .blocks = 512, .packs = 8};
  EXPECT_EQ(ChooseProduct(kH200, small, kWeightGradientTiles).split, 8);
  small.packs = 1;
  EXPECT_EQ(ChooseProduct(kH200, small, kWeightGradientTiles).split, 1);
}

}  // namespace
}  // namespace isobit::cuda
