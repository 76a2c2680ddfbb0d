// ForwardProbe: equal passes give equal digests on any number of ranks, and a fault of the
// arithmetic is seen first at the op that has it.
#include "kernels/model/forward_probe.h"

#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/model/forward_probe_fixture.h"

namespace isobit {
namespace {

using ForwardProbeTest = ForwardProbeFixture;

TEST_F(ForwardProbeTest, RanksAndBackendsGiveOneDigest) {
  const ProbeReport one = Probe(1);
  EXPECT_EQ(one.digests.size(), 3 + 12 * static_cast<size_t>(config_.num_layers));
  for (const int size : {2, 4, 8}) EXPECT_EQ(FirstDifference(one, Probe(size)).layer, -1) << size;
  EXPECT_EQ(FirstDifference(one, ProbeOf([] { return MakeOracleBackend(); }, 2)).layer, -1);
}

TEST_F(ForwardProbeTest, RowsAndValuesAreTheWholeModels) {
  for (const ProbeOp op :
       {ProbeOp::kQkv, ProbeOp::kK, ProbeOp::kAttention, ProbeOp::kGate, ProbeOp::kActivation}) {
    const ProbeWanted wanted = {.site = ProbeSite{1, op}, .row = 3};
    const ProbeReport one = Probe(1, wanted), four = Probe(4, wanted);
    EXPECT_EQ(one.row_digests.size(), kTokens.size());
    EXPECT_EQ(one.row_digests, four.row_digests);
    EXPECT_FALSE(one.values.empty());
    EXPECT_EQ(one.values, four.values);
  }
  const auto heads =
      static_cast<size_t>(config_.num_heads) + 2 * static_cast<size_t>(config_.num_kv_heads);
  EXPECT_EQ(Probe(4, {.site = ProbeSite{0, ProbeOp::kQkv}, .row = 0}).values.size(),
            heads * static_cast<size_t>(config_.head_dim));
}

TEST_F(ForwardProbeTest, AFaultIsSeenWhereItIs) {
  const ProbeReport right = Probe(1);
  const std::vector<std::pair<Fault, ProbeSite>> cases = {
      {Fault::kScale, {1, ProbeOp::kAttention}},
      {Fault::kPosition, {1, ProbeOp::kQ}},
      {Fault::kPage, {1, ProbeOp::kAttention}},
      {Fault::kNorm, {1, ProbeOp::kInputNorm}},
      {Fault::kActivation, {1, ProbeOp::kActivation}},
      {Fault::kModesSum, {1, ProbeOp::kAttentionSum}},
  };
  for (const auto& [fault, site] : cases) {
    for (const int size : {1, 2, 4}) {
      if (fault == Fault::kModesSum && size == 1) continue;  // nothing is summed
      const ProbeSite found = FirstDifference(right, Probe(size, {}, fault));
      EXPECT_EQ(found, site) << "fault " << static_cast<int>(fault) << " of " << size
                             << " ranks: layer " << found.layer << ", op "
                             << static_cast<int>(found.op);
    }
  }
}

TEST_F(ForwardProbeTest, AFaultOfOneElementIsFoundThere) {
  const ProbeWanted wanted = {.site = ProbeSite{1, ProbeOp::kActivation}, .row = 0};
  const ProbeReport right = Probe(2, wanted), wrong = Probe(1, wanted, Fault::kActivation);
  EXPECT_NE(right.row_digests[0], wrong.row_digests[0]);
  EXPECT_EQ(right.row_digests[1], wrong.row_digests[1]);
  ASSERT_EQ(right.values.size(), wrong.values.size());
  for (size_t c = 0; c < right.values.size(); ++c) {
    EXPECT_EQ(right.values[c] != wrong.values[c], c == 5) << c;
  }
}

}  // namespace
}  // namespace isobit
