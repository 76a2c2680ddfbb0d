// The forward pass's half of the invariance matrix: every logit of tiny models of each
// architecture, bit for bit, over tensor-parallel size x batch x phase x page layout x threads x
// instruction set; and for each dimension a control that shows the comparison failing when
// something depends on it.
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/invariance/forward_harness.h"
#include "tests/invariance/order_dependent_ops.h"
#include "tests/invariance/tiny_models.h"
#include "tests/support/bitwise.h"
#include "tests/support/test_name.h"

namespace isobit::invariance {
namespace {

using testing_support::BitwiseEqual;

constexpr int64_t kLength = 40;
constexpr int64_t kPrefill = 23;

Schedule OnCpu(NumericsMode mode = NumericsMode::kTree) {
  Schedule schedule;
  schedule.make_ops = [mode] { return MakeCpuBackend({.mode = mode}); };
  return schedule;
}

bool AllEqual(const std::vector<SequenceLogits>& a, const std::vector<SequenceLogits>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!BitwiseEqual(a[i], b[i])) return false;
  }
  return true;
}

class ForwardInvarianceTest : public testing::TestWithParam<std::string> {
 protected:
  ForwardInvarianceTest() : model_(TinyModelDirectory(GetParam())) {
    for (uint32_t s = 0; s < 3; ++s)
      sequences_.push_back(model_.RandomTokens(kLength - 7 * s, 100 + s));
  }

  // What every schedule must give: one pass, TP 1.
  std::vector<SequenceLogits> Expected() const { return model_.Run(sequences_, OnCpu()); }

  const ForwardHarness model_;
  std::vector<Tokens> sequences_;
};

// INVARIANT: the CPU backend evaluates the scalar definition.
TEST_P(ForwardInvarianceTest, EqualsTheScalarDefinition) {
  Schedule oracle;
  oracle.make_ops = [] { return MakeOracleBackend(); };
  const auto expected = model_.Run({sequences_[2]}, oracle);
  EXPECT_TRUE(BitwiseEqual(model_.Run({sequences_[2]}, OnCpu())[0], expected[0]));
}

// INVARIANT: tensor-parallel size.
TEST_P(ForwardInvarianceTest, TensorParallelSize) {
  const auto expected = Expected();
  for (const int tp_size : {2, 4, 8}) {
    Schedule schedule = OnCpu();
    schedule.tp_size = tp_size;
    EXPECT_TRUE(AllEqual(model_.Run(sequences_, schedule), expected)) << "TP " << tp_size;
    schedule.make_ops = OnCpu(NumericsMode::kBatchInvariant).make_ops;
    if (tp_size > 2) {
      EXPECT_FALSE(AllEqual(model_.Run(sequences_, schedule), expected))
          << "control, TP " << tp_size;
    }
  }
}

// INVARIANT: batch: alone, in a crowd, permuted, repeated.
TEST_P(ForwardInvarianceTest, Batch) {
  const auto expected = Expected();
  for (size_t s = 0; s < sequences_.size(); ++s) {
    EXPECT_TRUE(BitwiseEqual(model_.Run({sequences_[s]}, OnCpu())[0], expected[s]))
        << "alone, sequence " << s;
  }
  std::vector<Tokens> crowd;
  for (uint32_t i = 0; i < 16; ++i) {
    crowd.push_back(i == 9 ? sequences_[1] : model_.RandomTokens(1 + 3 * i, 7 + i));
  }
  EXPECT_TRUE(BitwiseEqual(model_.Run(crowd, OnCpu())[9], expected[1])) << "in a crowd of 16";
  const auto repeated = model_.Run({sequences_[2], sequences_[0], sequences_[2]}, OnCpu());
  EXPECT_TRUE(BitwiseEqual(repeated[0], expected[2]));
  EXPECT_TRUE(BitwiseEqual(repeated[2], expected[2]));

  Schedule vanilla = OnCpu(NumericsMode::kVanilla);
  EXPECT_FALSE(BitwiseEqual(model_.Run({sequences_[1]}, vanilla)[0], model_.Run(crowd, vanilla)[9]))
      << "control";
}

// INVARIANT: phase: prefill, decode, and any cut between them.
TEST_P(ForwardInvarianceTest, Phase) {
  const auto expected = Expected();
  for (const int64_t prefill : {int64_t{1}, kPrefill, kLength - 1}) {
    for (const int tp_size : {1, 4}) {
      Schedule schedule = OnCpu();
      schedule.prefill = prefill;
      schedule.tp_size = tp_size;
      EXPECT_TRUE(AllEqual(model_.Run(sequences_, schedule), expected))
          << "prefill " << prefill << ", TP " << tp_size;
    }
  }
  Schedule vanilla = OnCpu(NumericsMode::kVanilla);
  const auto one_pass = model_.Run({sequences_[0]}, vanilla);
  vanilla.prefill = kPrefill;
  EXPECT_FALSE(AllEqual(model_.Run({sequences_[0]}, vanilla), one_pass)) << "control";
}

// INVARIANT: rows of a sequence in a step, after what is cached: logits, and the keys and values
// that they leave.
TEST_P(ForwardInvarianceTest, RowsAtATime) {
  const auto expected = Expected();
  const auto run = [&](Schedule schedule, int64_t decode_rows,
                       std::vector<std::vector<Bf16>>& caches) {
    schedule.prefill = kPrefill;
    schedule.decode_rows = decode_rows;
    schedule.page_size = 5;
    schedule.caches = &caches;
    return model_.Run(sequences_, schedule);
  };
  for (const int tp_size : {1, 4}) {
    Schedule schedule = OnCpu();
    schedule.tp_size = tp_size;
    std::vector<std::vector<Bf16>> one_by_one, caches;
    EXPECT_TRUE(AllEqual(run(schedule, 1, one_by_one), expected));
    for (const int64_t rows : {2, 3, 8}) {
      EXPECT_TRUE(AllEqual(run(schedule, rows, caches), expected)) << rows << ", TP " << tp_size;
      EXPECT_EQ(caches, one_by_one) << rows << " rows, TP " << tp_size;
    }
    Schedule spoiled = schedule;
    spoiled.swap_first_pages = true;
    EXPECT_FALSE(AllEqual(run(spoiled, 8, caches), expected)) << "control";
    EXPECT_NE(caches, one_by_one) << "control";
    spoiled = schedule;
    spoiled.make_ops = OnCpu(NumericsMode::kVanilla).make_ops;
    EXPECT_FALSE(AllEqual(run(spoiled, 8, caches), run(spoiled, 1, one_by_one))) << "control";
  }
}

// The same for the scalar definition.
TEST_P(ForwardInvarianceTest, RowsAtATimeOfTheDefinition) {
  Schedule oracle;
  oracle.make_ops = [] { return MakeOracleBackend(); };
  oracle.prefill = 5;
  const std::vector<Tokens> one = {Tokens(sequences_[2].begin(), sequences_[2].begin() + 13)};
  const auto expected = model_.Run(one, OnCpu());
  for (const int64_t rows : {2, 3, 8}) {
    oracle.decode_rows = rows;
    EXPECT_TRUE(AllEqual(model_.Run(one, oracle), expected)) << rows << " rows";
  }
}

// INVARIANT: steps computed in two halves, which cut sequences anywhere; prefill and decode.
TEST_P(ForwardInvarianceTest, Halves) {
  const auto expected = Expected();
  for (const int64_t prefill : {int64_t{0}, int64_t{1}, kPrefill}) {
    for (const int tp_size : {2, 4}) {
      Schedule schedule = OnCpu();
      schedule.prefill = prefill;
      schedule.tp_size = tp_size;
      schedule.overlap_rows = 2;
      EXPECT_TRUE(AllEqual(model_.Run(sequences_, schedule), expected))
          << "prefill " << prefill << ", TP " << tp_size;
    }
  }
}

// INVARIANT: page size and page order.
TEST_P(ForwardInvarianceTest, Pages) {
  const auto expected = Expected();
  for (const int32_t page_size : {1, 5, 16, 128}) {
    Schedule schedule = OnCpu();
    schedule.page_size = page_size;
    schedule.scatter_pages = true;
    schedule.prefill = kPrefill;
    EXPECT_TRUE(AllEqual(model_.Run(sequences_, schedule), expected)) << "page size " << page_size;
  }
  Schedule spoiled = OnCpu();
  spoiled.page_size = 8;
  spoiled.prefill = kPrefill;
  spoiled.swap_first_pages = true;
  EXPECT_FALSE(AllEqual(model_.Run(sequences_, spoiled), expected)) << "control";
}

// INVARIANT: threads and instruction sets.
TEST_P(ForwardInvarianceTest, ThreadsAndInstructionSets) {
  const auto expected = Expected();
  int variants = 0;
  for (const cpu::Isa isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    if (isa > cpu::DetectIsa()) continue;
    for (const int threads : {1, 2}) {
      Schedule schedule = OnCpu();
      schedule.make_ops = [&] { return MakeCpuBackend({.isa = isa, .num_threads = threads}); };
      EXPECT_TRUE(AllEqual(model_.Run(sequences_, schedule), expected))
          << cpu::IsaName(isa) << " x " << threads;
      ++variants;
    }
  }
  std::printf("%d of 6 variants run on this machine\n", variants);
  Schedule spoiled = OnCpu();
  spoiled.make_ops = [] { return std::make_unique<OrderDependentOps>(); };
  EXPECT_FALSE(AllEqual(model_.Run(sequences_, spoiled), expected)) << "control";
}

INSTANTIATE_TEST_SUITE_P(Architectures, ForwardInvarianceTest, testing::ValuesIn(TinyModelNames()),
                         testing_support::TestName);
#ifndef ISOBIT_SANITIZED  // it shows bits that rounding hides elsewhere; sanitizers judge no bits
INSTANTIATE_TEST_SUITE_P(Witness, ForwardInvarianceTest, testing::Values("witness-deep"),
                         testing_support::TestName);
#endif

}  // namespace
}  // namespace isobit::invariance
