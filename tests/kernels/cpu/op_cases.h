// Shared by the op tests: every configuration of the CPU backend, random operands of several kinds,
// buffers with guard zones, and comparison by bit pattern.
#ifndef ISOBIT_TESTS_KERNELS_CPU_OP_CASES_H_
#define ISOBIT_TESTS_KERNELS_CPU_OP_CASES_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/contract/portable.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/ops/linear_shape.h"
#include "kernels/weight_packer.h"

namespace isobit::testing_support {

using Random = std::mt19937_64;

// Every instruction set of this machine, each with 1, 2 and 3 threads.
std::vector<CpuOptions> AllCpuOptions();
std::string Describe(const CpuOptions& options);

// Kinds of operands of a product.
enum class Family {
  kNormal,
  kWide,      // exponents over 45 binades
  kZeros,     // two of five are zeros of either sign
  kIntegers,  // small integers: sums cancel exactly
};
inline constexpr Family kFamilies[] = {Family::kNormal, Family::kWide, Family::kZeros,
                                       Family::kIntegers};

float RandomValue(Family family, Random& random);
std::vector<Bf16> RandomBf16(Family family, int64_t n, Random& random);
std::vector<float> RandomFloats(Family family, int64_t n, Random& random);

// For a K of eight equal leaves, makes the product of leaf 4+i minus that of leaf (i+1) mod 4. The
// leaves then cancel crosswise, so a wrong order of addition changes bits.
void CancelLeaves(const LinearShape& shape, int64_t rows, std::vector<Bf16>* x,
                  std::vector<Bf16>* w);

// An output of n elements, all NaN at first, between two guard zones.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t n) : values_(static_cast<size_t>(n) + 2 * kGuard, Poison()) {}

  T* data() { return values_.data() + kGuard; }
  std::span<const T> span() const { return {values_.data() + kGuard, values_.size() - 2 * kGuard}; }
  bool GuardsIntact() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (!IsPoison(values_[i]) || !IsPoison(values_[values_.size() - 1 - i])) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  static T Poison() {
    if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(0x7fc12345u);
    return static_cast<T>(0x7fd5);
  }
  static bool IsPoison(T x) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    return std::bit_cast<Bits>(x) == std::bit_cast<Bits>(Poison());
  }

  std::vector<T> values_;
};

// EXPECT_TRUE(SameBits(actual, expected))
template <typename T>
testing::AssertionResult SameBits(std::span<const T> actual, std::span<const T> expected) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  if (actual.size() != expected.size()) return testing::AssertionFailure() << "sizes differ";
  size_t unequal = 0;
  size_t first = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::bit_cast<Bits>(actual[i]) == std::bit_cast<Bits>(expected[i])) continue;
    if (unequal++ == 0) first = i;
  }
  if (unequal == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << absl::StrFormat(
             "%d of %d elements differ; first at [%d]: 0x%x, expected 0x%x", unequal, actual.size(),
             first, std::bit_cast<Bits>(actual[first]), std::bit_cast<Bits>(expected[first]));
}

// A weight in a backend's layout, with its own memory.
class PackedWeight {
 public:
  PackedWeight(const Backend& ops, const LinearShape& shape, const Bf16* w, int64_t ldw);

  const LinearWeight& weight() const { return weight_; }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
  LinearWeight weight_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_CPU_OP_CASES_H_
