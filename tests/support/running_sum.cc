// The product, the sums, and what a slot holds.
#include "tests/support/running_sum.h"

#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/ops/linear.h"

namespace isobit::testing_support {
namespace {

// At a slot's begin. The sums follow, then the activations.
struct SlotHeader {
  int64_t written = 0;  // 1 + the row to which the slot was extended; 0: never written
};

void Copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);  // the pointers of an empty copy may be null
}

size_t AsSize(int64_t count) { return static_cast<size_t>(count); }

std::byte* SlotOf(const BlockState& state, int32_t slot) {
  return state.slots + AsSize(slot) * state.slot_stride;
}

}  // namespace

struct RunningSum::Past {
  int64_t columns = 0;
  int64_t row = 0;              // to which it was extended
  std::vector<float> sums;      // [columns]: S before the first row of `row`'s chunk
  std::vector<Bf16> activated;  // [rows of the chunk before `row`, columns]
};

RunningSum::RunningSum(const ModelConfig& config, int layer, int index_in_layer,
                       ParameterTable& table, int32_t slot_rows)
    : Block(kKind, layer, index_in_layer), slot_rows_(slot_rows) {
  const int64_t hidden = config.hidden_size;
  const int64_t intermediate = config.intermediate_size;
  norm_ = table.Norm("post_norm", "post_attention_layernorm", hidden);
  gate_up_ = table.Linear({.name = "gate_up",
                           .tensors = {{"mlp.gate_proj", {intermediate, hidden}},
                                       {"mlp.up_proj", {intermediate, hidden}}},
                           .cut = Cut::kColumnParallel,
                           .gated = true});
  gate_up_bias_ = table.Bias(gate_up_, config.mlp_bias);
  down_ = table.Linear({.name = "down",
                        .tensors = {{"mlp.down_proj", {hidden, intermediate}}},
                        .cut = Cut::kRowParallel});
  down_bias_ = table.Bias(down_, config.mlp_bias);
  down_parameter_ = table.rows()[static_cast<size_t>(down_)];
}

StateSpec RunningSum::State(const RankShape& rank) const {
  const auto columns = static_cast<size_t>(LinearOf(down_parameter_, rank).k);
  const auto rows = static_cast<size_t>(slot_rows_ - 1);
  return {.slot_bytes = sizeof(SlotHeader) + columns * (sizeof(float) + rows * sizeof(Bf16)),
          .slot_rows = slot_rows_};
}

std::vector<int64_t> RunningSum::Activations(const BlockWeights& shapes) const {
  return {shapes.linear(down_).shape.k};
}

absl::Status RunningSum::Forward(const BlockPass& pass) const {
  const BlockWeights& w = pass.weights;
  const LinearWeight gate_up = w.linear(gate_up_);
  const LinearWeight down = w.linear(down_);
  const int64_t columns = down.shape.k;
  Bf16* const activated = pass.activations[0];
  ISOBIT_RETURN_IF_ERROR(pass.ops.Run(LinearArgs{.x = pass.normed,
                                                 .ldx = gate_up.shape.k,
                                                 .m = pass.rows.rows,
                                                 .weight = gate_up,
                                                 .bias = w.fp32(gate_up_bias_),
                                                 .swiglu_out = activated,
                                                 .ldy = columns}));
  for (const SequenceRows& sequence : pass.rows.sequences.host) {
    ISOBIT_ASSIGN_OR_RETURN(Past past, Load(sequence, columns, pass.state));
    Extend(past, sequence.num_rows, activated + sequence.first_row * columns);
    if (sequence.to_slot != kNoSlot) Store(past, SlotOf(pass.state, sequence.to_slot));
  }
  return pass.Add(activated, down, w.fp32(down_bias_));
}

absl::StatusOr<RunningSum::Past> RunningSum::Load(const SequenceRows& sequence, int64_t columns,
                                                  const BlockState& slots) const {
  const int64_t row = sequence.first_position;
  Past past = {
      .columns = columns, .row = row, .sums = std::vector<float>(AsSize(columns)), .activated = {}};
  if (sequence.from_slot == kNoSlot) {
    if (row == 0) return past;
    return absl::InternalError(absl::StrCat("row ", row, " goes on from no slot"));
  }
  const std::byte* const slot = SlotOf(slots, sequence.from_slot);
  SlotHeader header;
  Copy(&header, slot, sizeof(header));
  const int64_t end = header.written - 1;
  if (end < row || end / slot_rows_ != row / slot_rows_) {
    return absl::InternalError(absl::StrCat("row ", row, " goes on from slot ", sequence.from_slot,
                                            ", which was extended to row ", end));
  }
  const std::byte* const sums = slot + sizeof(header);
  const size_t sums_bytes = past.sums.size() * sizeof(float);
  Copy(past.sums.data(), sums, sums_bytes);
  // Those at `row` and behind it are of tokens that the sequence no longer has.
  past.activated.resize(AsSize(row % slot_rows_ * columns));
  Copy(past.activated.data(), sums + sums_bytes, past.activated.size() * sizeof(Bf16));
  return past;
}

void RunningSum::Store(const Past& past, std::byte* slot) const {
  const SlotHeader header = {.written = past.row + 1};
  Copy(slot, &header, sizeof(header));
  std::byte* const sums = slot + sizeof(header);
  const size_t sums_bytes = past.sums.size() * sizeof(float);
  Copy(sums, past.sums.data(), sums_bytes);
  Copy(sums + sums_bytes, past.activated.data(), past.activated.size() * sizeof(Bf16));
}

void RunningSum::Extend(Past& past, int64_t num_rows, Bf16* rows) const {
  std::vector<float> sums = past.sums;  // S before the next row
  const auto add = [&sums](const Bf16* activated) {
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i] = 0.5f * sums[i] + contract::Bf16ToFloat(activated[i]);
    }
  };
  for (size_t i = 0; i < past.activated.size(); i += sums.size()) add(past.activated.data() + i);
  for (int64_t r = 0; r < num_rows; ++r) {
    Bf16* const row = rows + r * past.columns;
    add(row);
    past.activated.insert(past.activated.end(), row, row + past.columns);
    for (size_t i = 0; i < sums.size(); ++i) row[i] = contract::FloatToBf16(sums[i]);
    if (++past.row % slot_rows_ > 0) continue;
    past.sums = sums;
    past.activated.clear();
  }
}

ModelPlan PlanWithRunningSums(const ModelConfig& config, int32_t slot_rows) {
  ISOBIT_CHECK(slot_rows == 1 || slot_rows == 4) << slot_rows;
  return slot_rows == 1 ? PlanWithRunningSums<1>(config) : PlanWithRunningSums<4>(config);
}

}  // namespace isobit::testing_support
