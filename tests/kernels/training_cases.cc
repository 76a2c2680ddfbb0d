// The comparison over all configurations of the CPU backend.
#include "tests/kernels/training_cases.h"

#include <algorithm>
#include <cstddef>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/oracle/oracle_backend.h"

namespace isobit::testing_support {

int64_t Differences(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  EXPECT_EQ(a.size(), b.size());
  int64_t count = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

void ExpectSameBits(const Bits& actual, const Bits& expected) {
  for (const auto& [name, patterns] : expected.tensors()) {
    const std::vector<uint64_t>& other = actual[name];
    const int64_t differences = Differences(other, patterns);
    if (differences == 0) continue;
    const auto first =
        static_cast<size_t>(std::ranges::mismatch(other, patterns).in1 - other.begin());
    ADD_FAILURE() << name << ": " << differences << " of " << patterns.size()
                  << " elements differ; first at [" << first << "]: 0x" << std::hex << other[first]
                  << ", expected 0x" << patterns[first];
  }
}

Bits ExpectOracleBits(RunOp run) {
  const Bits expected = run(*MakeOracleBackend());
  for (const CpuOptions& options : AllCpuOptions()) {
    SCOPED_TRACE(Describe(options));
    ExpectSameBits(run(*MakeCpuBackend(options)), expected);
  }
  return expected;
}

std::vector<int64_t> RandomPacks(int64_t rows, int64_t count, Random& random) {
  std::vector<int64_t> bounds = {0, rows};
  while (static_cast<int64_t>(bounds.size()) < count + 1) {
    // A bound that is drawn again makes an empty pack.
    bounds.push_back(random() % 4 == 0
                         ? bounds[random() % bounds.size()]
                         : static_cast<int64_t>(random() % static_cast<uint64_t>(rows + 1)));
  }
  std::ranges::sort(bounds);
  return bounds;
}

std::vector<Bf16> WithBlocksReversed(const std::vector<Bf16>& x, int64_t columns) {
  constexpr int64_t kBlock = 16;
  std::vector<Bf16> out;
  const auto rows = static_cast<int64_t>(x.size()) / columns;
  for (int64_t first = rows - kBlock; first >= 0; first -= kBlock) {
    const auto begin = x.begin() + first * columns;
    out.insert(out.end(), begin, begin + kBlock * columns);
  }
  return out;
}

}  // namespace isobit::testing_support
