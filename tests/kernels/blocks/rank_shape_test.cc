// A rank owns whole leaves of everything, whatever the head count. The shares of W ranks make the
// whole, and the leaves that a rank sums are those that a single rank would sum.
#include "kernels/blocks/rank_shape.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
#include "tests/support/status_matchers.h"
#include "tools/model_shapes.h"

namespace isobit {
namespace {

using testing_support::StatusIs;

// A rank's share of every layer.
struct RankLinears {
  RankLinears(const ModelConfig& config, const RankShape& shape) {
    const ModelPlan plan(config);
    const auto linear = [&](const std::vector<Parameter>& block, const char* name) {
      return LinearOf(*FindParameter(block, name), shape);
    };
    qkv = linear(plan.parameters[1], "qkv");
    o = linear(plan.parameters[1], "o");
    gate_up = linear(plan.parameters[2], "gate_up");
    down = linear(plan.parameters[2], "down");
    head = linear(plan.parameters.back(), "head");
    const Parameter& weight = *FindParameter(plan.parameters[2], "down");
    intermediate = SliceOf(weight, weight.tensors[0], shape).columns;
  }

  LinearShape qkv, o, gate_up, down, head;
  Interval intermediate;
};

TEST(RankShapeTest, SharesMakeTheWholeForEveryShapeAndSize) {
  for (const std::string& name : ModelShapeNames()) {
    const ModelConfig config = *NamedModelShape(name);
    const RankShape whole = *ShapeOfRank(config, 0, 1);
    EXPECT_EQ(whole.heads, config.num_heads);
    EXPECT_EQ(whole.kv_heads.size(), config.num_kv_heads);
    const RankLinears whole_linears(config, whole);
    EXPECT_EQ(whole_linears.o.k, int64_t{config.num_heads} * config.head_dim);
    EXPECT_EQ(whole_linears.down.k, config.intermediate_size);
    EXPECT_EQ(whole_linears.head.n, config.vocab_size);
    for (const int size : {2, 4, 8}) {
      SCOPED_TRACE(name + " on " + std::to_string(size));
      RankShape last;
      Interval last_intermediate;
      int leaf = 0;
      for (int rank = 0; rank < size; ++rank) {
        const RankShape share = *ShapeOfRank(config, rank, size);
        const RankLinears linears(config, share);
        EXPECT_EQ(share.kv_heads.begin, last.kv_heads.end);
        EXPECT_EQ(linears.intermediate.begin, last_intermediate.end);
        EXPECT_EQ(share.vocab.begin, last.vocab.end);
        EXPECT_EQ(share.heads * config.num_kv_heads, share.kv_heads.size() * config.num_heads);
        EXPECT_EQ(linears.qkv.k, config.hidden_size);
        EXPECT_EQ(linears.qkv.n, (share.heads + 2 * share.kv_heads.size()) * config.head_dim);
        EXPECT_EQ(linears.o.n, config.hidden_size);
        EXPECT_EQ(linears.o.k, share.heads * config.head_dim);
        EXPECT_EQ(linears.gate_up.n, 2 * linears.down.k);
        EXPECT_TRUE(linears.gate_up.gated && !linears.qkv.gated);
        EXPECT_EQ(linears.head.n, share.vocab.size());
        // Row-parallel leaves are the whole's leaves, one after the other.
        const int64_t o_begin =
            share.kv_heads.begin * config.num_heads / config.num_kv_heads * config.head_dim;
        for (int l = 0; l < linears.o.num_leaves; ++l, ++leaf) {
          EXPECT_EQ(linears.o.bounds[l] + o_begin, whole_linears.o.bounds[leaf]);
          EXPECT_EQ(linears.down.bounds[l] + linears.intermediate.begin,
                    whole_linears.down.bounds[leaf]);
        }
        last = share;
        last_intermediate = linears.intermediate;
      }
      EXPECT_EQ(leaf, contract::kLeaves);
      EXPECT_EQ(last.kv_heads.end, config.num_kv_heads);
      EXPECT_EQ(last_intermediate.end, config.intermediate_size);
      EXPECT_EQ(last.vocab.end, config.vocab_size);
    }
  }
}

TEST(RankShapeTest, NineHeadsOnFourRanksLeaveOneIdle) {
  const ModelConfig config = *NamedModelShape("smollm2-135m");
  const int64_t expected[] = {0, 3, 3, 3};
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_EQ(ShapeOfRank(config, rank, 4)->heads, expected[rank]) << rank;
}

TEST(RankShapeTest, RefusesOtherSizesAndRanks) {
  const ModelConfig config = *NamedModelShape("tiny-llama");
  for (const int size : {-1, 0, 3, 16}) {
    EXPECT_THAT(
        ShapeOfRank(config, 0, size).status(),
        StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("expected 1, 2, 4 or 8")));
  }
  EXPECT_THAT(ShapeOfRank(config, 4, 4).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("[0, 4)")));
}

}  // namespace
}  // namespace isobit
