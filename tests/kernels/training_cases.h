// Shared by the tests of training ops: an op's results as bit patterns, compared with the oracle's.
#ifndef ISOBIT_TESTS_KERNELS_TRAINING_CASES_H_
#define ISOBIT_TESTS_KERNELS_TRAINING_CASES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/op_table.h"
#include "tests/kernels/cpu/op_cases.h"

namespace isobit::testing_support {

// The results of one call: the bit patterns of each named tensor.
class Bits {
 public:
  void Add(const std::string& name, std::span<const Bf16> x) { AddAs<uint16_t>(name, x); }
  void Add(const std::string& name, std::span<const float> x) { AddAs<uint32_t>(name, x); }
  void Add(const std::string& name, std::span<const double> x) { AddAs<uint64_t>(name, x); }
  template <typename T>
  void Add(const std::string& name, const Guarded<T>& x) {
    EXPECT_TRUE(x.GuardsIntact()) << name;
    Add(name, x.span());
  }

  const std::vector<uint64_t>& operator[](const std::string& name) const {
    return tensors_.at(name);
  }
  const std::map<std::string, std::vector<uint64_t>>& tensors() const { return tensors_; }

 private:
  template <typename Pattern, typename T>
  void AddAs(const std::string& name, std::span<const T> x) {
    for (const T value : x) tensors_[name].push_back(std::bit_cast<Pattern>(value));
  }

  std::map<std::string, std::vector<uint64_t>> tensors_;
};

// Runs one op and collects its results.
using RunOp = absl::FunctionRef<Bits(OpTable&)>;

// How many elements of a tensor differ.
int64_t Differences(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b);
void ExpectSameBits(const Bits& actual, const Bits& expected);
// Every configuration of the CPU backend gives the oracle's bits, which are returned.
Bits ExpectOracleBits(RunOp run);

// Bounds of `count` packs (a power of two) of `rows` rows; some are empty.
std::vector<int64_t> RandomPacks(int64_t rows, int64_t count, Random& random);
// The rows of `x` [rows, columns] in blocks of 16, the last block first: what only another order of
// sums could turn into other bits. rows: a multiple of 16.
std::vector<Bf16> WithBlocksReversed(const std::vector<Bf16>& x, int64_t columns);

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_TRAINING_CASES_H_
