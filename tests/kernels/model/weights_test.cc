// Blocks of weights: every parameter of the checkpoint is in exactly one rank's blocks (norms and
// the embedding are in all), at the place to which the block's binding points.
#include "kernels/model/weights.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "gtest/gtest.h"
#include "kernels/blocks/attention.h"
#include "kernels/blocks/gated_mlp.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/model/model_plan.h"
#include "kernels/plain_weight_packer.h"
#include "tests/support/all_tensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

class WeightsTest : public testing::TestWithParam<std::string> {
 protected:
  WeightsTest() : config_(*NamedModelShape(GetParam())) {
    ISOBIT_EXPECT_OK(MakeRandomModel(config_, 1, root_.File("model")));
    tensors_ = testing_support::AllTensors(*Checkpoint::Open(root_.File("model")));
  }

  std::vector<Bf16> Read(const std::string& name) const {
    const Tensor* tensor = tensors_.Find(name);
    std::vector<Bf16> values(tensor->NumElements());
    tensor->ToBf16(values.data());
    return values;
  }

  // The columns of down_proj on a rank.
  Interval IntermediateOf(const RankShape& shape) const {
    const Parameter down = *FindParameter(ModelPlan(config_).parameters[2], "down");
    return SliceOf(down, down.tensors[0], shape).columns;
  }

  const testing_support::TempDir root_;
  const ModelConfig config_;
  const PlainWeightPacker packer_;
  TensorSet tensors_;
};

TEST_P(WeightsTest, EveryRowAndColumnIsWhereItBelongs) {
  const int64_t hidden = config_.hidden_size;
  const int64_t d = config_.head_dim;
  const int64_t heads_per_kv = config_.num_heads / config_.num_kv_heads;
  const std::vector<Bf16> k_proj = Read("model.layers.1.self_attn.k_proj.weight");
  const std::vector<Bf16> up_proj = Read("model.layers.1.mlp.up_proj.weight");
  const std::vector<Bf16> o_proj = Read("model.layers.1.self_attn.o_proj.weight");
  const std::vector<Bf16> down_proj = Read("model.layers.1.mlp.down_proj.weight");
  for (const int size : {1, 4}) {
    for (int rank = 0; rank < size; ++rank) {
      const RankShape shape = *ShapeOfRank(config_, rank, size);
      const WeightLayout layout(config_, shape, packer_);
      // The second layer's attention and MLP.
      const auto packed = [&](int block) {
        AlignedBytes bytes = AllocateAligned(layout.BlockBytes(block));
        layout.PackBlock(tensors_, block, bytes.get());
        return bytes;
      };
      const AlignedBytes attention_bytes = packed(3), mlp_bytes = packed(4);
      const BlockWeights w = layout.Bind(3, attention_bytes.get());
      const BlockWeights mlp_weights = layout.Bind(4, mlp_bytes.get());
      const auto& attention = dynamic_cast<const Attention&>(*layout.plan().blocks[2]);
      const auto& mlp = dynamic_cast<const GatedMlp&>(*layout.plan().blocks[3]);
      const auto rows_of = [](const LinearWeight& weight) {
        return reinterpret_cast<const Bf16*>(weight.packed);
      };
      const Bf16* const o = rows_of(w.linear(attention.o()));
      const Bf16* const down = rows_of(mlp_weights.linear(mlp.down()));
      const Interval intermediate = IntermediateOf(shape);
      const int64_t o_columns = w.linear(attention.o()).shape.k;
      const int64_t down_columns = mlp_weights.linear(mlp.down()).shape.k;
      // k rows follow the q rows; up rows follow the gate rows.
      const Bf16* k_rows = rows_of(w.linear(attention.qkv())) + shape.heads * d * hidden;
      const Bf16* up_rows =
          rows_of(mlp_weights.linear(mlp.gate_up())) + intermediate.size() * hidden;
      EXPECT_TRUE(std::equal(k_rows, k_rows + shape.kv_heads.size() * d * hidden,
                             k_proj.begin() + shape.kv_heads.begin * d * hidden));
      EXPECT_TRUE(std::equal(up_rows, up_rows + intermediate.size() * hidden,
                             up_proj.begin() + intermediate.begin * hidden));
      const int64_t first_o = shape.kv_heads.begin * heads_per_kv * d;
      for (int64_t n = 0; n < hidden; ++n) {
        EXPECT_TRUE(std::equal(o + n * o_columns, o + (n + 1) * o_columns,
                               o_proj.begin() + n * config_.num_heads * d + first_o));
        EXPECT_TRUE(
            std::equal(down + n * down_columns, down + (n + 1) * down_columns,
                       down_proj.begin() + n * config_.intermediate_size + intermediate.begin));
      }
      EXPECT_EQ(w.bf16(attention.q_norm()) != nullptr, config_.qk_norm);
      const float* const qkv_bias = w.fp32(attention.qkv_bias());
      EXPECT_EQ(qkv_bias != nullptr, config_.qkv_bias);
      if (qkv_bias != nullptr) {
        const std::vector<Bf16> v_bias = Read("model.layers.1.self_attn.v_proj.bias");
        for (int64_t i = 0; i < shape.kv_heads.size() * d; ++i) {
          EXPECT_EQ(contract::BitsOf(qkv_bias[(shape.heads + shape.kv_heads.size()) * d + i]),
                    uint32_t{v_bias[static_cast<size_t>(shape.kv_heads.begin * d + i)]} << 16);
        }
      }
    }
  }
}

TEST_P(WeightsTest, EqualWeightsGiveEqualBytes) {
  const WeightLayout layout(config_, *ShapeOfRank(config_, 1, 4), packer_);
  for (int block = 0; block < layout.num_blocks(); ++block) {
    const size_t bytes = layout.BlockBytes(block);
    const AlignedBytes a = AllocateAligned(bytes);
    const AlignedBytes b = AllocateAligned(bytes);
    std::memset(a.get(), 0xff, bytes);
    std::memset(b.get(), 0x00, bytes);
    layout.PackBlock(tensors_, block, a.get());
    layout.PackBlock(tensors_, block, b.get());
    EXPECT_EQ(std::memcmp(a.get(), b.get(), bytes), 0) << "block " << block;
  }
}

// Linear layers twice in a block, in two layouts: each as in a block of its own, all else once.
TEST_P(WeightsTest, CopiesOfLinearLayersLieBehindTheBlock) {
  for (const int rank : {0, 3}) {
    const RankShape shape = *ShapeOfRank(config_, rank, 4);
    const WeightLayout layout(config_, shape, CpuWeightPacker());
    const WeightLayout plain(config_, shape, packer_);
    const WeightLayout copies = WeightLayout::WithCopies(layout, packer_);
    for (int block = 0; block < layout.num_blocks(); ++block) {
      const AlignedBytes expected = AllocateAligned(layout.BlockBytes(block));
      layout.PackBlock(tensors_, block, expected.get());
      const AlignedBytes rows = AllocateAligned(plain.BlockBytes(block));
      plain.PackBlock(tensors_, block, rows.get());
      ASSERT_GE(copies.BlockBytes(block), layout.BlockBytes(block));
      const AlignedBytes both = AllocateAligned(copies.BlockBytes(block));
      layout.PackBlock(tensors_, block, both.get());
      copies.PackBlock(tensors_, block, both.get());
      EXPECT_EQ(std::memcmp(both.get(), expected.get(), layout.BlockBytes(block)), 0) << block;
      size_t num_linear = 0;
      const auto& parameters = layout.plan().parameters[static_cast<size_t>(block)];
      for (ParameterIndex i = 0; i < static_cast<ParameterIndex>(parameters.size()); ++i) {
        const Parameter& parameter = parameters[static_cast<size_t>(i)];
        const BlockWeights of_copies = copies.Bind(block, both.get());
        if (parameter.op == ParameterOp::kLinear) {
          ++num_linear;
          const LinearWeight copy = of_copies.linear(i);
          EXPECT_GE(copy.packed, both.get() + layout.BlockBytes(block));
          EXPECT_EQ(std::memcmp(copy.packed, plain.Bind(block, rows.get()).linear(i).packed,
                                packer_.PackedBytes(copy.shape)),
                    0)
              << block << ", " << parameter.name;
        } else if (parameter.packed == DType::kBf16) {
          EXPECT_EQ(of_copies.bf16(i), layout.Bind(block, both.get()).bf16(i));
        } else {
          EXPECT_EQ(of_copies.fp32(i), layout.Bind(block, both.get()).fp32(i));
        }
      }
      EXPECT_EQ(num_linear, block == 0 ? 0u : block == layout.head_block() ? 1u : 2u);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, WeightsTest,
                         testing::Values("tiny-qwen3", "tiny-qwen2", "tiny-llama"),
                         [](const testing::TestParamInfo<std::string>& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace isobit
