// Weights in a GPU's memory become the bytes and sums that the host makes of them: rounding of
// every dtype, alignment and stride, packing in both layouts and back, biases, sums of any part of
// a tensor.
#include "kernels/cuda/sm90/weights/cuda_device_packer.h"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/sm90/linear/packer.h"
#include "kernels/cuda/sm90/weights/weight_kernels.h"
#include "kernels/plain_weight_packer.h"
#include "tests/kernels/cuda/device_case.h"
#include "tests/support/host_packer.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing_support::DeviceBuffer;
using testing_support::HostPacker;
using testing_support::StatusIs;

class CudaDevicePackerTest : public testing::Test {
 protected:
  void SetUp() override {
    ISOBIT_SKIP_WITHOUT_GPU();
    ISOBIT_ASSERT_OK_AND_ASSIGN(device_, CudaDevice::Create(0));
    ISOBIT_ASSERT_OK_AND_ASSIGN(packer_, device_->MakePacker());
  }

  // Every pattern, NaN and subnormals among them.
  std::vector<uint16_t> Bits(int64_t count) {
    std::vector<uint16_t> bits(static_cast<size_t>(count));
    for (uint16_t& value : bits) value = static_cast<uint16_t>(random_());
    return bits;
  }

  std::mt19937 random_{1};
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<DevicePacker> packer_;
  HostPacker host_;
};

TEST_F(CudaDevicePackerTest, Rounds) {
  struct Case {
    int64_t rows, columns, stride, to_stride;
    size_t offset;  // values
  };
  const std::vector<Case> cases = {{5, 64, 64, 64, 0},          {300, 4096, 4096, 4096, 0},
                                   {7, 24, 40, 24, 8},          {7, 24, 40, 32, 4},
                                   {9, 13, 13, 13, 0},          {9, 13, 17, 21, 3},
                                   {1, 65536, 65536, 65536, 0}, {1000, 1, 1, 1, 1}};
  for (const StoredAs stored : {StoredAs::kBf16, StoredAs::kF16, StoredAs::kF32}) {
    for (const Case& c : cases) {
      const int64_t item = stored == StoredAs::kF32 ? 2 : 1;  // 16-bit words
      const int64_t size = static_cast<int64_t>(c.offset) + c.rows * c.stride;
      const std::vector<uint16_t> bits = Bits(size * item);
      DeviceBuffer<uint16_t> source(bits);
      const auto at = [&](const uint16_t* words) {
        return StoredMatrix{words + static_cast<int64_t>(c.offset) * item, stored, c.rows,
                            c.columns, c.stride};
      };
      // What lies between rows stays poison.
      std::vector<Bf16> expected(static_cast<size_t>(c.rows * c.to_stride), 0xffff);
      ISOBIT_ASSERT_OK(host_.Round(at(bits.data()), expected.data(), c.to_stride));
      DeviceBuffer<Bf16> rounded(c.rows * c.to_stride);
      ISOBIT_ASSERT_OK(packer_->Round(at(source.data()), rounded.data(), c.to_stride));
      ISOBIT_ASSERT_OK(packer_->Finish());
      EXPECT_EQ(rounded.CopyOut(), expected) << static_cast<int>(stored) << " " << c.columns;
      EXPECT_TRUE(rounded.GuardsIntact());
    }
  }
}

TEST_F(CudaDevicePackerTest, RoundsEveryHalf) {
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<Bf16> expected(bits.size());
  const auto at = [](const uint16_t* words) {
    return StoredMatrix{words, StoredAs::kF16, 256, 256, 256};
  };
  ISOBIT_ASSERT_OK(host_.Round(at(bits.data()), expected.data(), 256));
  DeviceBuffer<uint16_t> source(bits);
  DeviceBuffer<Bf16> rounded(65536);
  ISOBIT_ASSERT_OK(packer_->Round(at(source.data()), rounded.data(), 256));
  ISOBIT_ASSERT_OK(packer_->Finish());
  EXPECT_EQ(rounded.CopyOut(), expected);
}

// Shapes of linear layers: gates and ups, queries, keys and values, a head; the leaves of one rank
// and of several; whole blocks and parts of blocks, rows that are aligned and rows that are not.
std::vector<LinearShape> Shapes() {
  struct Case {
    int64_t n, k;
    bool gated;
    int leaves;  // of a row-parallel rank's 8 / W, or 8
  };
  std::vector<LinearShape> shapes;
  for (const Case& c : std::vector<Case>{{64, 512, false, 8},
                                         {4096, 4096, false, 8},
                                         {70, 100, false, 8},
                                         {1, 16, false, 8},
                                         {30, 77, true, 8},
                                         {128, 520, true, 8},
                                         {96, 1024, false, 2},
                                         {33, 48, false, 4},
                                         {6144, 1024, false, 8},
                                         {3076, 1024, true, 8},
                                         {18993, 256, false, 8}}) {
    LinearShape shape = {.n = c.n, .k = c.k, .num_leaves = c.leaves, .gated = c.gated};
    const contract::LeafPlan plan = contract::PlanColumns(c.k * 8 / c.leaves);
    for (int l = 0; l <= c.leaves; ++l) {
      shape.bounds[l] = std::min(plan.bounds[static_cast<size_t>(l)], c.k);
    }
    shape.bounds[c.leaves] = c.k;
    shapes.push_back(shape);
  }
  return shapes;
}

TEST_F(CudaDevicePackerTest, PacksBothLayouts) {
  const PlainWeightPacker plain;
  const std::vector<const WeightPacker*> layouts = {&cuda::LinearPacker(), &plain};
  for (const WeightPacker* layout : layouts) {
    for (const LinearShape& shape : Shapes()) {
      const std::vector<uint16_t> bits = Bits(shape.n * shape.k);
      std::vector<std::byte> expected(layout->PackedBytes(shape));
      ISOBIT_ASSERT_OK(host_.Pack(shape, *layout, bits.data(), expected.data()));
      DeviceBuffer<Bf16> source(bits);
      DeviceBuffer<std::byte> packed(static_cast<int64_t>(expected.size()));
      ISOBIT_ASSERT_OK(packer_->Pack(shape, *layout, source.data(), packed.data()));
      ISOBIT_ASSERT_OK(packer_->Finish());
      EXPECT_TRUE(packed.CopyOut() == expected) << shape.n << " x " << shape.k;
      EXPECT_TRUE(packed.GuardsIntact());
    }
  }
}

// What the packed layout holds, row after row; also where its rows begin off 16 bytes. The padding
// of the packed matrix, here not zeros, goes nowhere.
TEST_F(CudaDevicePackerTest, UnpacksWhatTheHostPacks) {
  const PlainWeightPacker plain;
  const WeightPacker& layout = cuda::LinearPacker();
  for (const LinearShape& shape : Shapes()) {
    const std::vector<uint16_t> bits = Bits(shape.n * shape.k);
    std::vector<std::byte> packed(layout.PackedBytes(shape));
    std::vector<std::byte> filled(packed.size());
    layout.Pack(shape, bits.data(), shape.k, packed.data());
    const std::vector<uint16_t> ones(bits.size(), 0xffff);
    layout.Pack(shape, ones.data(), shape.k, filled.data());
    for (size_t i = 0; i < packed.size(); ++i) packed[i] |= ~filled[i];
    std::vector<Bf16> expected(bits.size());
    plain.Pack(shape, bits.data(), shape.k, reinterpret_cast<std::byte*>(expected.data()));
    DeviceBuffer<std::byte> source(packed);
    for (const size_t offset : {0, 2}) {
      DeviceBuffer<Bf16> rows(shape.n * shape.k, offset);
      const auto unpacked = [&](const LinearShape& as) {
        rows.Poison();
        EXPECT_TRUE(
            cuda::UnpackLinearOnDevice({as, source.data()}, rows.data(), device_->stream()).ok());
        EXPECT_TRUE(device_->Synchronize().ok());
        return rows.CopyOut();
      };
      EXPECT_TRUE(unpacked(shape) == expected)
          << shape.n << " x " << shape.k << ", offset " << offset;
      EXPECT_TRUE(rows.GuardsIntact());
      if (!shape.gated) continue;
      LinearShape other = shape;
      other.gated = false;
      EXPECT_FALSE(unpacked(other) == expected) << "control: gates and ups as they are packed";
    }
  }
}

TEST_F(CudaDevicePackerTest, WidensBiasesAndFillsWithZeros) {
  const std::vector<uint16_t> bits = Bits(1027);
  std::vector<float> expected(bits.size());
  ISOBIT_ASSERT_OK(host_.Widen(bits.data(), 1027, expected.data()));
  DeviceBuffer<Bf16> source(bits);
  DeviceBuffer<float> widened(1027);
  ISOBIT_ASSERT_OK(packer_->Widen(source.data(), 1027, widened.data()));
  ISOBIT_ASSERT_OK(packer_->Finish());
  EXPECT_EQ(std::memcmp(widened.CopyOut().data(), expected.data(), 1027 * sizeof(float)), 0);
  ISOBIT_ASSERT_OK(
      packer_->FillWithZeros(reinterpret_cast<std::byte*>(widened.data()), 1027 * sizeof(float)));
  ISOBIT_ASSERT_OK(packer_->Finish());
  EXPECT_EQ(widened.CopyOut(), std::vector<float>(1027, 0.0f));
  EXPECT_TRUE(widened.GuardsIntact());
}

TEST_F(CudaDevicePackerTest, SumsAnyPart) {
  struct Case {
    int64_t rows, columns;
    PartOfTensor part;
  };
  const std::vector<Case> cases = {{3, 8, {0, 0, 8}},        {500, 4096, {7, 0, 4096}},
                                   {11, 13, {100, 0, 13}},   {11, 5, {3, 8, 13}},
                                   {9, 20, {1, 4, 1000}},    {1000, 1, {30, 0, 1}},
                                   {2, 70001, {0, 0, 70001}}};
  for (const Case& c : cases) {
    std::vector<uint16_t> bits = Bits(c.rows * c.columns);
    for (const bool changed : {false, true}) {
      if (changed) bits.back() ^= 1;
      std::vector<uint64_t> expected = {5, 7, 0};
      ISOBIT_ASSERT_OK(host_.AddSums(bits.data(), c.rows, c.columns, c.part, expected.data()));
      DeviceBuffer<Bf16> source(bits);
      DeviceBuffer<uint64_t> sums(std::vector<uint64_t>{5, 7, 0});
      ISOBIT_ASSERT_OK(packer_->AddSums(source.data(), c.rows, c.columns, c.part, sums.data()));
      ISOBIT_ASSERT_OK(packer_->Finish());
      EXPECT_EQ(sums.CopyOut(), expected) << c.columns;
    }
  }
}

// INVARIANT: the kernel that sums weights finds the first value that is not finite, whatever the
// part, its alignment and how it is stored.
TEST_F(CudaDevicePackerTest, FindsTheFirstValueThatIsNotFinite) {
  const std::vector<uint16_t> nonfinite = {0x7f80, 0xff80, 0x7fc0, 0xff81, 0x7fff};
  const std::vector<uint16_t> finite = {0x7f7f, 0xff7f, 0x0000, 0x8000, 0x0080};
  for (const int64_t columns : {1, 5, 8, 13, 4096}) {
    const PartOfTensor part = {.first_row = 11, .first_column = 8, .tensor_columns = columns + 8};
    const int64_t rows = 300;
    std::vector<uint16_t> bits(static_cast<size_t>(rows * columns));
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = finite[i % finite.size()];
    const auto place_of = [&] {
      DeviceBuffer<Bf16> source(bits);
      DeviceBuffer<uint64_t> sums(std::vector<uint64_t>{0, 0, 0});
      ISOBIT_EXPECT_OK(packer_->AddSums(source.data(), rows, columns, part, sums.data()));
      ISOBIT_EXPECT_OK(packer_->Finish());
      return sums.CopyOut()[2];
    };
    EXPECT_EQ(place_of(), 0) << columns;
    for (const size_t at : {bits.size() - 1, bits.size() / 2, size_t{0}}) {  // each before the last
      bits[at] = nonfinite[(at + static_cast<size_t>(columns)) % nonfinite.size()];
      const auto row = static_cast<uint64_t>(at) / static_cast<uint64_t>(columns);
      const auto column = static_cast<uint64_t>(at) % static_cast<uint64_t>(columns);
      EXPECT_EQ(~place_of(), (11 + row) * static_cast<uint64_t>(columns + 8) + 8 + column);
    }
  }
}

TEST_F(CudaDevicePackerTest, RefusesWhatIsNoHandle) {
  EXPECT_THAT(packer_->MapForeign("short"),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("5 bytes")));
  EXPECT_THAT(packer_->MapForeign(std::string(64, 'x')),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("this host")));
  ISOBIT_EXPECT_OK(packer_->Finish());  // the GPU still works
}

}  // namespace
}  // namespace isobit
