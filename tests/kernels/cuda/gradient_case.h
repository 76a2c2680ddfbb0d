// What the tests of training's CUDA ops share: the oracle, packs, scratch, and comparison in which
// a NaN equals every NaN.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_GRADIENT_CASE_H_
#define ISOBIT_TESTS_KERNELS_CUDA_GRADIENT_CASE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cuda/row_case.h"

namespace isobit::testing_support {

class GradientTest : public RowTest {
 protected:
  // Bounds of 1, 2, 4, ... packs, rarely 64, some of which are empty.
  std::vector<int64_t> AnyPacks(int64_t rows) {
    const int64_t count = int64_t{1} << (Chance(16) ? 6 : Below(4));
    std::vector<int64_t> bounds = {0, rows};
    while (static_cast<int64_t>(bounds.size()) <= count) bounds.push_back(Below(rows + 1));
    std::sort(bounds.begin(), bounds.end());
    return bounds;
  }
  // Rows of a narrow or a wide matrix: enough for several blocks of a column sum if there is time.
  int64_t RowsOfPacks(int64_t width, int64_t elements) {
    return Chance(16) ? 0 : Rows(width, elements);
  }

  OracleBackend oracle_;
};

// The contract promises no payloads of fp32 and float64 NaNs here.
template <typename T>
testing::AssertionResult SameNumbers(std::vector<T> actual, std::vector<T> expected) {
  for (std::vector<T>* values : {&actual, &expected}) {
    for (T& x : *values) x = x != x ? T{12345.5} : x;
  }
  return SameBits(View(actual), View(expected));
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_CUDA_GRADIENT_CASE_H_
