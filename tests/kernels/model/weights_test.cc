// Blocks of weights: every parameter of the checkpoint is in exactly one rank's blocks (norms and
// the embedding in all), in the place that the layer's binding points to.
#include "kernels/model/weights.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/tensor_names.h"
#include "gtest/gtest.h"
#include "kernels/oracle/oracle_ops.h"
#include "tests/support/all_tensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

class WeightsTest : public testing::TestWithParam<std::string> {
 protected:
  WeightsTest() : config_(*NamedModelShape(GetParam())), ops_(MakeOracleOps()) {
    ISOBIT_EXPECT_OK(MakeRandomModel(config_, 1, root_.File("model")));
    tensors_ = testing_support::AllTensors(*Checkpoint::Open(root_.File("model")));
  }

  std::vector<Bf16> Read(const std::string& name) const {
    const Tensor* tensor = tensors_.Find(name);
    std::vector<Bf16> values(tensor->NumElements());
    tensor->ToBf16(values.data());
    return values;
  }

  const testing_support::TempDir root_;
  const ModelConfig config_;
  const std::unique_ptr<Ops> ops_;  // its packed layout is the plain matrix
  TensorSet tensors_;
};

TEST_P(WeightsTest, EveryRowAndColumnIsWhereItBelongs) {
  const int64_t hidden = config_.hidden_size;
  const int64_t d = config_.head_dim;
  const int64_t group = config_.num_heads / config_.num_kv_heads;
  const std::vector<Bf16> k_proj = Read(LayerTensorName(1, "self_attn.k_proj.weight"));
  const std::vector<Bf16> up_proj = Read(LayerTensorName(1, "mlp.up_proj.weight"));
  const std::vector<Bf16> o_proj = Read(LayerTensorName(1, "self_attn.o_proj.weight"));
  const std::vector<Bf16> down_proj = Read(LayerTensorName(1, "mlp.down_proj.weight"));
  for (const int size : {1, 4}) {
    for (int rank = 0; rank < size; ++rank) {
      const RankShape shape = *ShapeOfRank(config_, rank, size);
      const WeightLayout layout(config_, shape, *ops_);
      const AlignedBytes block = AllocateAligned(layout.BlockBytes(2));
      layout.PackBlock(tensors_, *ops_, 2, block.get());
      const LayerWeights w = layout.BindLayer(block.get());
      const auto matrix = [](const LinearWeight& weight) {
        return reinterpret_cast<const Bf16*>(weight.packed);
      };
      // k rows follow the q rows; up rows follow the gate rows.
      const Bf16* k_rows = matrix(w.qkv) + shape.heads * d * hidden;
      const Bf16* up_rows = matrix(w.gate_up) + shape.intermediate.size() * hidden;
      EXPECT_TRUE(std::equal(k_rows, k_rows + shape.kv_heads.size() * d * hidden,
                             k_proj.begin() + shape.kv_heads.begin * d * hidden));
      EXPECT_TRUE(std::equal(up_rows, up_rows + shape.intermediate.size() * hidden,
                             up_proj.begin() + shape.intermediate.begin * hidden));
      const int64_t first_o = shape.kv_heads.begin * group * d;
      for (int64_t n = 0; n < hidden; ++n) {
        EXPECT_TRUE(std::equal(matrix(w.o) + n * shape.o.k, matrix(w.o) + (n + 1) * shape.o.k,
                               o_proj.begin() + n * config_.num_heads * d + first_o));
        EXPECT_TRUE(std::equal(
            matrix(w.down) + n * shape.down.k, matrix(w.down) + (n + 1) * shape.down.k,
            down_proj.begin() + n * config_.intermediate_size + shape.intermediate.begin));
      }
      EXPECT_EQ(w.q_norm != nullptr, config_.qk_norm);
      EXPECT_EQ(w.qkv_bias != nullptr, config_.qkv_bias);
      if (w.qkv_bias != nullptr) {
        const std::vector<Bf16> v_bias = Read(LayerTensorName(1, "self_attn.v_proj.bias"));
        for (int64_t i = 0; i < shape.kv_heads.size() * d; ++i) {
          EXPECT_EQ(contract::BitsOf(w.qkv_bias[(shape.heads + shape.kv_heads.size()) * d + i]),
                    uint32_t{v_bias[static_cast<size_t>(shape.kv_heads.begin * d + i)]} << 16);
        }
      }
    }
  }
}

TEST_P(WeightsTest, EqualWeightsGiveEqualBytes) {
  const WeightLayout layout(config_, *ShapeOfRank(config_, 1, 4), *ops_);
  for (int block = 0; block < layout.num_blocks(); ++block) {
    const size_t bytes = layout.BlockBytes(block);
    const AlignedBytes a = AllocateAligned(bytes);
    const AlignedBytes b = AllocateAligned(bytes);
    std::memset(a.get(), 0xff, bytes);
    std::memset(b.get(), 0x00, bytes);
    layout.PackBlock(tensors_, *ops_, block, a.get());
    layout.PackBlock(tensors_, *ops_, block, b.get());
    EXPECT_EQ(std::memcmp(a.get(), b.get(), bytes), 0) << "block " << block;
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
