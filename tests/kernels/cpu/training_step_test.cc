// A whole training step on the CPU backend has the oracle's bits, whatever the instruction set and
// the threads.
#include "tests/kernels/training_step.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/oracle/oracle_backend.h"

namespace isobit::testing_support {
namespace {

Bits RunStep(OpTable& ops, const std::vector<int64_t>& packs) {
  struct alignas(256) Line {
    std::byte bytes[256];
  };
  std::vector<std::vector<Line>> blocks;
  const StepMemory memory = {.allocate =
                                 [&blocks](size_t bytes) {
                                   return blocks.emplace_back(bytes / sizeof(Line) + 1)[0].bytes;
                                 },
                             .wait = [] {}};
  return RunTrainingStep(ops, packs, memory);
}

TEST(TrainingStepTest, HasTheOraclesBits) {
  const std::vector<int64_t> packs = {0, 70, 70, 150, kStepRows};
  const Bits expected = ExpectOracleBits([&packs](OpTable& ops) { return RunStep(ops, packs); });
  // Control: another order of the sums over rows shows in each of them.
  const Bits other = RunStep(*MakeOracleBackend(), {0, kStepRows});
  for (const char* const name : kSumsOverRows) {
    EXPECT_GT(Differences(expected[name], other[name]), 0) << name;
  }
  // The step exercises what it says: no result is all zeros.
  for (const auto& [name, patterns] : expected.tensors()) {
    EXPECT_GT(Differences(patterns, std::vector<uint64_t>(patterns.size())), 0) << name;
  }
}

}  // namespace
}  // namespace isobit::testing_support
