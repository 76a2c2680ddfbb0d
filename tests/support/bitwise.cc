// Walks two spans by bit pattern and describes the first difference.
#include "tests/support/bitwise.h"

#include <bit>
#include <cstddef>
#include <cstdint>

#include "absl/strings/str_format.h"

namespace isobit::testing_support {

testing::AssertionResult BitwiseEqual(std::span<const float> actual,
                                      std::span<const float> expected) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure()
           << absl::StrFormat("%d elements, expected %d", actual.size(), expected.size());
  }
  size_t mismatches = 0;
  size_t first = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::bit_cast<uint32_t>(actual[i]) == std::bit_cast<uint32_t>(expected[i])) continue;
    if (mismatches++ == 0) first = i;
  }
  if (mismatches == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << absl::StrFormat(
             "%d of %d elements differ; first at [%d]: %a (0x%08x), expected %a (0x%08x)",
             mismatches, actual.size(), first, actual[first],
             std::bit_cast<uint32_t>(actual[first]), expected[first],
             std::bit_cast<uint32_t>(expected[first]));
}

testing::AssertionResult BitwiseEqual(float actual, float expected) {
  return BitwiseEqual(std::span<const float>(&actual, 1), std::span<const float>(&expected, 1));
}

}  // namespace isobit::testing_support
