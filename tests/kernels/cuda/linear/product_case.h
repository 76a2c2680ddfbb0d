// What the tests of the training products share: random matrices with poisoned gaps, the parts of a
// weight, packs of any bounds, and the expected bits.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_LINEAR_PRODUCT_CASE_H_
#define ISOBIT_TESTS_KERNELS_CUDA_LINEAR_PRODUCT_CASE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/linear_shape.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::testing_support {

// [rows, columns] with leading dimension ld; the gaps are NaN.
struct HostMatrix {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t ld = 0;
  std::vector<Bf16> values = {};

  Bf16 at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * ld + c)]; }
};

inline HostMatrix RandomMatrix(Family family, int64_t rows, int64_t columns, int64_t ld,
                               Random& random) {
  HostMatrix m = {rows, columns, ld, RandomBf16(family, rows * ld, random)};
  for (int64_t i = 0; i < rows * ld; ++i) {
    if (i % ld >= columns) m.values[static_cast<size_t>(i)] = 0x7fc0;
  }
  return m;
}

// Rows [begin, end) of m, transposed: [columns, end - begin].
inline std::vector<Bf16> Transposed(const HostMatrix& m, int64_t begin, int64_t end) {
  std::vector<Bf16> out;
  for (int64_t c = 0; c < m.columns; ++c) {
    for (int64_t r = begin; r < end; ++r) out.push_back(m.at(r, c));
  }
  return out;
}

inline Backend& ProductCpu() {
  static const std::unique_ptr<Backend> ops =
      MakeCpuBackend({.num_threads = static_cast<int>(std::thread::hardware_concurrency())});
  return *ops;
}

// a [m, k] times b [n, k] transposed, fp32 [m, n]: by the CPU backend's layer of one leaf, which is
// one chain. The gradient tests hold that to the oracle.
inline std::vector<float> OneChain(const std::vector<Bf16>& a, const std::vector<Bf16>& b,
                                   int64_t m, int64_t n, int64_t k) {
  std::vector<float> y(static_cast<size_t>(m * n));
  if (m == 0 || n == 0 || k == 0) return y;
  LinearShape shape = {.n = n, .k = k, .num_leaves = 1};
  shape.bounds[1] = k;
  const PackedWeight packed(ProductCpu(), shape, b.data(), k);
  LinearArgs args;
  args.x = a.data();
  args.ldx = k;
  args.m = m;
  args.weight = packed.weight();
  args.fp32_out = y.data();
  args.ldy = n;
  EXPECT_TRUE(ProductCpu().Run(args).ok());
  return y;
}

// The balanced tree over sums of the same size, a power of two of them.
inline std::vector<float> TreeOfSums(std::vector<std::vector<float>> sums) {
  while (sums.size() > 1) {
    for (size_t i = 0; i < sums.size() / 2; ++i) {
      for (size_t e = 0; e < sums[0].size(); ++e) {
        sums[2 * i][e] = contract::Add(sums[2 * i][e], sums[2 * i + 1][e]);
      }
      std::swap(sums[i], sums[2 * i]);
    }
    sums.resize(sums.size() / 2);
  }
  return sums[0];
}

inline int64_t Below(int64_t n, Random& random) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
}

// Rows of 1 to kMaxParts parts, of which all are multiples of `unit` but perhaps the last.
inline std::vector<int64_t> RandomParts(int64_t most, int64_t unit, Random& random) {
  std::vector<int64_t> rows;
  const int64_t parts = 1 + Below(kMaxParts, random);
  for (int64_t i = 0; i < parts; ++i) {
    rows.push_back(unit * (1 + Below(std::max<int64_t>(1, most / parts / unit), random)));
  }
  if (Below(3, random) == 0) rows.back() += Below(unit, random);
  return rows;
}

// Bounds of `packs` packs of `rows` rows in all; some are empty.
inline std::vector<int64_t> RandomPacks(int packs, int64_t rows, Random& random) {
  std::vector<int64_t> bounds = {0};
  for (int i = 1; i < packs; ++i) {
    bounds.push_back(Below(4, random) == 0 ? bounds.back() : Below(rows + 1, random));
  }
  bounds.push_back(rows);
  std::ranges::sort(bounds);
  return bounds;
}

inline std::string List(const std::vector<int64_t>& values) { return absl::StrJoin(values, " "); }

// A leading dimension for `columns` that a tensor map takes, or any.
inline int64_t RandomLd(int64_t columns, bool mappable, Random& random) {
  if (!mappable) return columns + Below(9, random);
  return (columns + 7) / 8 * 8 + 8 * Below(3, random);
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_CUDA_LINEAR_PRODUCT_CASE_H_
