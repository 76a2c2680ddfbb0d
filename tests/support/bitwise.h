// Equality of floats by bit pattern: -0 differs from +0, and two NaNs are equal only if their
// payloads are.
#ifndef ISOBIT_TESTS_SUPPORT_BITWISE_H_
#define ISOBIT_TESTS_SUPPORT_BITWISE_H_

#include <span>

#include "gtest/gtest.h"

namespace isobit::testing_support {

// EXPECT_TRUE(BitwiseEqual(a, b)); A failure tells how many elements differ, the first index, and
// both values (%a and hex).
testing::AssertionResult BitwiseEqual(std::span<const float> actual,
                                      std::span<const float> expected);
testing::AssertionResult BitwiseEqual(float actual, float expected);

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_BITWISE_H_
