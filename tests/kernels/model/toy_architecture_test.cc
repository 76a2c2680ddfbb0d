// A new architecture is only a table. With one more row in ToyPlan, and no other file of the
// product changed, names, checks, counts, random weights, a rank's cut, places in a block, packing
// and binding all have the new parameter.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/validate_tensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/pack_model.h"
#include "kernels/model/pack_parameter.h"
#include "kernels/model/weights.h"
#include "kernels/plain_weight_packer.h"
#include "tests/support/drawn_weights.h"
#include "tests/support/status_matchers.h"
#include "tools/model_shapes.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::DrawnWeights;
using testing_support::StatusIs;

constexpr char kToy[] = "toy";
constexpr int kBlock = 3;  // the block whose bytes are checked: attention of layer 1

ModelConfig Config() { return *NamedModelShape("tiny-llama"); }

// The only change: rows that no architecture has today. "#" stands for the layer.
std::vector<Parameter> ToyRows() {
  const ModelConfig config = Config();
  const int64_t hidden = config.hidden_size;
  const int64_t heads = config.num_heads;
  const int64_t kv_heads = config.num_kv_heads;
  return {
      {.name = kToy,
       .op = ParameterOp::kNorm,
       .tensors = {{"model.layers.#.post_feedforward_layernorm.weight", {hidden}}}},
      {.name = kToy,
       .op = ParameterOp::kBias,
       .tensors = {{"model.layers.#.self_attn.sinks.bias", {heads}}},
       .cut = Cut::kColumnParallel,
       .units = kv_heads,
       .packed = DType::kF32},
      {.name = kToy,
       .tensors = {{"model.layers.#.shared.gate.weight", {96, hidden}},
                   {"model.layers.#.shared.up.weight", {96, hidden}}},
       .cut = Cut::kColumnParallel,
       .gated = true},
      {.name = kToy,
       .tensors = {{"model.layers.#.shared.down.weight", {hidden, 96}}},
       .cut = Cut::kRowParallel},
  };
}

ModelPlan ToyPlan(const Parameter& row) {
  ModelPlan plan(Config());
  for (size_t block = 0; block < plan.blocks.size(); block += 2) {
    Parameter parameter = row;
    for (TensorSpec& tensor : parameter.tensors) {
      tensor.name.replace(tensor.name.find('#'), 1, absl::StrCat(plan.blocks[block]->layer()));
    }
    plan.parameters[block + 1].push_back(std::move(parameter));
  }
  return plan;
}

// Lets only kBlock be packed.
class OneBlock final : public WeightStore {
 public:
  OneBlock(const WeightLayout& layout, std::byte* out) : layout_(layout), out_(out) {}
  absl::StatusOr<std::vector<PackTask>> Plan() override {
    return std::vector<PackTask>{
        {.layout = &layout_, .block = kBlock, .bytes = layout_.BlockBytes(kBlock), .place = out_}};
  }
  absl::Status Put(const PackTask& /*task*/, const std::byte* /*packed*/) override {
    return absl::InternalError("it has a place");
  }

 private:
  const WeightLayout& layout_;
  std::byte* const out_;
};

class ToyArchitectureTest : public testing::TestWithParam<size_t> {
 protected:
  ToyArchitectureTest()
      : plan_(ToyPlan(ToyRows()[GetParam()])),
        toy_(*FindParameter(plan_.parameters[kBlock], kToy)),
        source_(plan_) {}

  AlignedBytes PackedBlock(const WeightLayout& layout) const {
    AlignedBytes bytes = AllocateAligned(layout.BlockBytes(kBlock));
    OneBlock store(layout, bytes.get());
    ISOBIT_EXPECT_OK(PackModel(source_, "", store));
    return bytes;
  }

  const std::byte* AddressOf(const BlockWeights& weights, const Parameter& parameter) const {
    const auto& parameters = plan_.parameters[kBlock];
    const auto found = std::ranges::find(parameters, parameter.name, &Parameter::name);
    const auto index = static_cast<ParameterIndex>(found - parameters.begin());
    if (parameter.op == ParameterOp::kLinear) return weights.linear(index).packed;
    if (parameter.packed == DType::kF32) {
      return reinterpret_cast<const std::byte*>(weights.fp32(index));
    }
    return reinterpret_cast<const std::byte*>(weights.bf16(index));
  }

  // The toy parameter's first `count` elements in a block.
  std::vector<float> Bound(const BlockWeights& weights, size_t count) const {
    const std::byte* const at = AddressOf(weights, toy_);
    std::vector<float> values(count);
    if (toy_.packed == DType::kF32) {
      std::copy_n(reinterpret_cast<const float*>(at), count, values.begin());
    } else {
      ConvertToFloat(DType::kBf16, at, count, values.data());
    }
    return values;
  }

  // A rank's elements of the toy parameter, out of the checkpoint.
  std::vector<float> SlicesOf(const RankShape& shape) const {
    std::vector<float> values;
    for (const TensorSpec& tensor : toy_.tensors) {
      const std::vector<Bf16> all = source_.Values(tensor.name);
      const int64_t width = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
      const Slice slice = SliceOf(toy_, tensor, shape);
      for (int64_t row = slice.rows.begin; row < slice.rows.end; ++row) {
        for (int64_t column = slice.columns.begin; column < slice.columns.end; ++column) {
          values.push_back(contract::Bf16ToFloat(all[static_cast<size_t>(row * width + column)]));
        }
      }
    }
    return values;
  }

  const ModelPlan plan_;
  const Parameter toy_;  // of kBlock
  const DrawnWeights source_;
  const PlainWeightPacker packer_;
};

TEST_P(ToyArchitectureTest, NamesChecksAndCountsFollow) {
  ISOBIT_EXPECT_OK(ValidateTensors(plan_, source_));
  for (const TensorSpec& tensor : toy_.tensors) {
    EXPECT_THAT(ValidateTensors(plan_, DrawnWeights(plan_, tensor.name)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat("missing tensors: ", tensor.name))));
  }
  const ModelPlan plain(Config());
  EXPECT_THAT(ValidateTensors(plain, source_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("unexpected tensors")));
  uint64_t added = 0;
  for (const TensorSpec& tensor : toy_.tensors) added += tensor.NumElements();
  EXPECT_EQ(NumParameters(plan_), NumParameters(plain) + added * (plan_.blocks.size() / 2));
}

TEST_P(ToyArchitectureTest, RandomWeightsSuitTheOperation) {
  double sum = 0, squares = 0, count = 0;
  for (const TensorSpec& tensor : toy_.tensors) {
    for (const Bf16 value : source_.Values(tensor.name)) {
      const double x = contract::Bf16ToFloat(value);
      sum += x, squares += x * x, count += 1;
    }
  }
  const double mean = sum / count;
  const double deviation = std::sqrt(squares / count - mean * mean);
  EXPECT_NEAR(mean, toy_.op == ParameterOp::kNorm ? 1.0 : 0.0, 0.06);
  const double expected = toy_.op == ParameterOp::kLinear
                              ? 1 / std::sqrt(static_cast<double>(toy_.tensors[0].shape[1]))
                              : 0.1;
  EXPECT_NEAR(deviation, expected, 0.4 * expected);
}

// Packs the whole model as a service does, and compares what the parameter is bound to with the
// rank's slices of the tensors, element by element.
TEST_P(ToyArchitectureTest, PackedAndBoundOnEveryRank) {
  for (const int size : {1, 4}) {
    size_t packed = 0;
    for (int rank = 0; rank < size; ++rank) {
      const WeightLayout layout(plan_, *ShapeOfRank(plan_.config, rank, size), packer_);
      const AlignedBytes block = PackedBlock(layout);
      const std::vector<float> expected = SlicesOf(layout.shape());
      const std::vector<float> bound = Bound(layout.Bind(kBlock, block.get()), expected.size());
      EXPECT_THAT(bound, testing::ElementsAreArray(expected));
      packed += expected.size();
    }
    size_t elements = 0;
    for (const TensorSpec& tensor : toy_.tensors) elements += tensor.NumElements();
    EXPECT_EQ(packed,
              toy_.cut == Cut::kReplicated ? static_cast<size_t>(size) * elements : elements);
  }
}

TEST_P(ToyArchitectureTest, OtherParametersKeepTheirBytesAndShareNone) {
  const RankShape shape = *ShapeOfRank(plan_.config, 1, 4);
  const WeightLayout layout(plan_, shape, packer_);
  const WeightLayout plain(ModelPlan(Config()), shape, packer_);
  const AlignedBytes block = PackedBlock(layout);
  const AlignedBytes plain_block = PackedBlock(plain);
  std::map<const std::byte*, size_t> places;
  for (const Parameter& parameter : plan_.parameters[kBlock]) {
    const std::byte* const at = AddressOf(layout.Bind(kBlock, block.get()), parameter);
    const size_t bytes = PackedBytesOf(parameter, shape, packer_);
    EXPECT_EQ((at - block.get()) % 128, 0);
    places[at] = bytes;
    if (parameter.name == kToy) continue;
    const std::byte* const plain_at = AddressOf(plain.Bind(kBlock, plain_block.get()), parameter);
    EXPECT_EQ(std::memcmp(at, plain_at, bytes), 0) << parameter.tensors[0].name;
  }
  EXPECT_EQ(places.size(), plan_.parameters[kBlock].size());
  const std::byte* end = block.get();
  for (const auto& [at, bytes] : places) {
    EXPECT_GE(at, end);
    end = at + bytes;
  }
  EXPECT_LE(end, block.get() + layout.BlockBytes(kBlock));
  EXPECT_EQ(layout.BlockBytes(0), plain.BlockBytes(0));
}

INSTANTIATE_TEST_SUITE_P(Rows, ToyArchitectureTest, testing::Range(size_t{0}, ToyRows().size()));

}  // namespace
}  // namespace isobit
