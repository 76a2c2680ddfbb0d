// Names of parametrised tests.
#ifndef ISOBIT_TESTS_SUPPORT_TEST_NAME_H_
#define ISOBIT_TESTS_SUPPORT_TEST_NAME_H_

#include <algorithm>
#include <string>

#include "gtest/gtest.h"

namespace isobit::testing_support {

// "tiny-qwen3" as GoogleTest wants it: tiny_qwen3.
inline std::string TestName(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_TEST_NAME_H_
