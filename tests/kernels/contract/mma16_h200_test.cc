// C1 against the hardware: recorded k16 steps of an NVIDIA H200 (wgmma m64n64k16, 2026-11-21),
// which a CPU must reproduce.
//
// h200_mma16.txt holds one step a line: c, a[16], b[16], result, as hex bit patterns; 14 lines from
// each family of inputs (every exponent range, subnormals, zeros of both signs, cancellation,
// overflow, infinities, NaN) out of 5,052,928 recorded.
#include <array>
#include <cstdint>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "kernels/contract/mma16.h"

namespace isobit::contract {
namespace {

struct Step {
  uint32_t c = 0;
  std::array<Bf16, kMmaK> a{};
  std::array<Bf16, kMmaK> b{};
  uint32_t result = 0;
};

std::array<Bf16, kMmaK> ParseOperands(const std::string& hex) {
  std::array<Bf16, kMmaK> operands{};
  for (size_t k = 0; k < operands.size(); ++k) {
    operands[k] = static_cast<Bf16>(std::stoul(hex.substr(4 * k, 4), nullptr, 16));
  }
  return operands;
}

TEST(Mma16H200Test, ReproducesRecordedSteps) {
  std::ifstream file(H200_MMA16_FILE);
  ASSERT_TRUE(file.is_open()) << H200_MMA16_FILE;
  std::string c;
  std::string a;
  std::string b;
  std::string result;
  int steps = 0;
  int non_finite = 0;
  int subnormal = 0;
  while (file >> c >> a >> b >> result) {
    ASSERT_EQ(a.size(), 64u);
    ASSERT_EQ(b.size(), 64u);
    const Step step = {static_cast<uint32_t>(std::stoul(c, nullptr, 16)), ParseOperands(a),
                       ParseOperands(b), static_cast<uint32_t>(std::stoul(result, nullptr, 16))};
    EXPECT_EQ(BitsOf(Mma16(FromBits(step.c), step.a.data(), step.b.data())), step.result)
        << "line " << steps + 1;
    const uint32_t field = (step.result >> 23) & 0xffu;
    non_finite += field == 0xffu ? 1 : 0;
    subnormal += field == 0 && (step.result & 0x7fffffu) != 0 ? 1 : 0;
    ++steps;
  }
  EXPECT_EQ(steps, 644);
  EXPECT_GT(non_finite, 50);
  EXPECT_GT(subnormal, 50);
}

}  // namespace
}  // namespace isobit::contract
