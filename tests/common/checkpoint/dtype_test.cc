// Conversions against arithmetic oracles: every binary16 value, and binary32 values around every
// rounding boundary.
#include "common/checkpoint/dtype.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace isobit {
namespace {

double F16Value(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

float Bf16Value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// The nearest of the three candidates around the truncated value, ties to the even one; in double,
// where it is exact.
uint16_t NearestBf16(uint32_t bits) {
  const double value = std::bit_cast<float>(bits);
  const auto truncated = static_cast<uint16_t>(bits >> 16);
  const auto next = static_cast<uint16_t>(truncated + 1);
  // Past the largest finite value the next candidate stands at 2^128 for the purpose of rounding.
  const double above = (next & 0x7fff) == 0x7f80 ? std::copysign(std::ldexp(1.0, 128), value)
                                                 : static_cast<double>(Bf16Value(next));
  const double down = std::abs(value - Bf16Value(truncated));
  const double up = std::abs(above - value);
  if (down != up) return down < up ? truncated : next;
  return (truncated & 1) == 0 ? truncated : next;
}

TEST(DTypeTest, EveryF16ConvertsExactly) {
  for (uint32_t i = 0; i <= 0xffff; ++i) {
    const auto half = static_cast<uint16_t>(i);
    const uint32_t bits = F32BitsFromF16(half);
    const uint32_t sign = (i & 0x8000) << 16;
    if ((i & 0x7fff) > 0x7c00) {
      ASSERT_EQ(bits, sign | 0x7fc00000 | ((i & 0x3ff) << 13)) << i;  // quiet, payload kept
    } else if ((i & 0x7fff) == 0x7c00) {
      ASSERT_EQ(bits, sign | 0x7f800000) << i;
    } else {
      ASSERT_EQ(bits, std::bit_cast<uint32_t>(static_cast<float>(F16Value(half)))) << i;
    }
  }
}

TEST(DTypeTest, RoundsF32ToNearestEven) {
  // Every upper half, with lower halves at and around the boundaries.
  for (uint32_t upper = 0; upper <= 0xffff; ++upper) {
    if ((upper & 0x7f80) == 0x7f80) continue;
    for (const uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = upper << 16 | lower;
      ASSERT_EQ(Bf16FromF32Bits(bits), NearestBf16(bits)) << std::hex << bits;
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 1000000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    if ((bits & 0x7f800000) == 0x7f800000) continue;
    ASSERT_EQ(Bf16FromF32Bits(bits), NearestBf16(bits)) << std::hex << bits;
  }
}

TEST(DTypeTest, KeepsInfinitiesAndMakesNansQuiet) {
  EXPECT_EQ(Bf16FromF32Bits(0x7f800000), 0x7f80);
  EXPECT_EQ(Bf16FromF32Bits(0xff800000), 0xff80);
  EXPECT_EQ(Bf16FromF32Bits(0x7f7fffff), 0x7f80);  // rounds up to infinity
  EXPECT_EQ(Bf16FromF32Bits(0x7f800001), 0x7fc0);  // signalling, payload in the lost half
  EXPECT_EQ(Bf16FromF32Bits(0xffffffff), 0xffff);  // must not carry into the sign
  EXPECT_EQ(Bf16FromF32Bits(0x7fc12345), 0x7fc1);
}

// Bulk conversions from an odd address, so that a careless cast shows under the sanitizer.
TEST(DTypeTest, ConvertsUnalignedArrays) {
  const std::vector<float> values = {1.0f, -0.0f, 3.14159f, 1e-40f, 65504.0f};
  const std::vector<uint16_t> halves = {0x3c00, 0x8000, 0x0001, 0x7bff, 0xc000};
  std::vector<char> storage(1 + values.size() * sizeof(float));
  std::vector<uint16_t> bf16(values.size());
  std::vector<float> floats(values.size());

  std::memcpy(storage.data() + 1, values.data(), values.size() * sizeof(float));
  ConvertToBf16(DType::kF32, storage.data() + 1, values.size(), bf16.data());
  EXPECT_EQ(bf16, (std::vector<uint16_t>{0x3f80, 0x8000, 0x4049, 0x0001, 0x4780}));
  ConvertToFloat(DType::kF32, storage.data() + 1, values.size(), floats.data());
  EXPECT_EQ(floats, values);

  std::memcpy(storage.data() + 1, halves.data(), halves.size() * sizeof(uint16_t));
  ConvertToBf16(DType::kF16, storage.data() + 1, halves.size(), bf16.data());
  EXPECT_EQ(bf16, (std::vector<uint16_t>{0x3f80, 0x8000, 0x3380, 0x4780, 0xc000}));
  ConvertToFloat(DType::kF16, storage.data() + 1, halves.size(), floats.data());
  EXPECT_EQ(floats, (std::vector<float>{1.0f, 0.0f, 0x1p-24f, 65504.0f, -2.0f}));

  ConvertToBf16(DType::kBf16, storage.data() + 1, halves.size(), bf16.data());
  EXPECT_EQ(bf16, halves);
  ConvertToFloat(DType::kBf16, storage.data() + 1, halves.size(), floats.data());
  EXPECT_EQ(std::bit_cast<uint32_t>(floats[0]), 0x3c000000u);
}

}  // namespace
}  // namespace isobit
