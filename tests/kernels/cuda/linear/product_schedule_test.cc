// Which tiles the products of training take.
#include "kernels/cuda/linear/product_schedule.h"

#include <vector>

#include "gtest/gtest.h"

namespace isobit::cuda {
namespace {

// The layers of Qwen3-8B on 16,384 rows.
TEST(ProductScheduleTest, LayersOfAModel) {
  // 30 column tiles of 208: 30 whole waves. 128 columns would be 47 waves, of which each costs two
  // thirds of one of 208.
  const ProductShape qkv = {.row_tiles = 128, .columns = {4096, 1024, 1024}, .blocks = 64};
  EXPECT_EQ(ChooseProduct(kH200, qkv, kChainTiles),
            (ProductSchedule{.columns = 208, .cluster = 2}));
  // Equal waves: the cluster reads less.
  const ProductShape o = {.row_tiles = 128, .columns = {4096}, .blocks = 64};
  EXPECT_EQ(ChooseProduct(kH200, o, kTreeTiles), (ProductSchedule{.columns = 128, .cluster = 2}));
  EXPECT_EQ(ChooseProduct(kH200, o, kInputGradientTiles),
            (ProductSchedule{.columns = 256, .cluster = 2}));
}

// The more packs, the more of their sums should wait on the chip.
TEST(ProductScheduleTest, PacksTakeSmallerTiles) {
  ProductShape qkv = {.row_tiles = 48, .columns = {4096}, .blocks = 256};
  std::vector<int> columns;
  for (const int packs : {1, 8, 64}) {
    qkv.packs = packs;
    columns.push_back(ChooseProduct(kH200, qkv, kWeightGradientTiles).columns);
  }
  EXPECT_EQ(columns, (std::vector<int>{256, 192, 128}));
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
