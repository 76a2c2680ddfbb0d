// A block with a slot, for tests, which the product does not know: a gated MLP whose activations
// are summed over the sequence, each weighing half as much as the next. It has the parameters of
// GatedMlp, so that every checkpoint has its tensors.
#ifndef ISOBIT_TESTS_SUPPORT_RUNNING_SUM_H_
#define ISOBIT_TESTS_SUPPORT_RUNNING_SUM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/blocks/attention.h"
#include "kernels/blocks/block.h"
#include "kernels/blocks/gated_mlp.h"
#include "kernels/contract/portable.h"
#include "kernels/model/model_plan.h"
#include "kernels/ops/sequences.h"

namespace isobit::testing_support {

// Of row t's activations a[t], y[t] = bf16(S[t]) with S[t] = S[t - 1] / 2 + a[t] in fp32. A slot
// that has been extended to row n holds S before the first row of n's chunk, and the activations of
// the chunk's rows before n, as recurrent blocks with chunks would. Forward fails if a slot cannot
// serve to go on from where the sequence does. Computes on the host.
class RunningSum : public Block {
 public:
  static constexpr char kKind[] = "running_sum";

  StateSpec State(const RankShape& rank) const override;
  std::vector<int64_t> Activations(const BlockWeights& shapes) const override;
  absl::Status Forward(const BlockPass& pass) const override;

 protected:
  // Adds the parameters to `table`. slot_rows: the rows of a chunk.
  RunningSum(const ModelConfig& config, int layer, int index_in_layer, ParameterTable& table,
             int32_t slot_rows);

 private:
  struct Past;  // what a slot holds

  // What the sequence goes on from. INTERNAL: its slot is of another row.
  absl::StatusOr<Past> Load(const SequenceRows& sequence, int64_t columns,
                            const BlockState& slots) const;
  void Store(const Past& past, std::byte* slot) const;
  // Replaces the activations [num_rows, columns] of the next rows by the sums.
  void Extend(Past& past, int64_t num_rows, Bf16* rows) const;

  const int32_t slot_rows_;
  ParameterIndex gate_up_, gate_up_bias_, down_, down_bias_;
  Parameter down_parameter_;
};

// The block with chunks of so many rows; with 1 a slot holds the sum alone.
template <int32_t kSlotRows>
class RunningSumOf final : public RunningSum {
 public:
  RunningSumOf(const ModelConfig& config, int layer, int index_in_layer, ParameterTable& table)
      : RunningSum(config, layer, index_in_layer, table, kSlotRows) {}
};

// The plan of the config whose first layer has that block in place of the gated MLP.
template <int32_t kSlotRows>
ModelPlan PlanWithRunningSums(const ModelConfig& config);

// The same for a number that is known later: 1 or 4.
ModelPlan PlanWithRunningSums(const ModelConfig& config, int32_t slot_rows);

// ---- Implementation

template <int32_t kSlotRows>
ModelPlan PlanWithRunningSums(const ModelConfig& config) {
  ModelPlan plan(config);
  plan.blocks.clear();
  plan.parameters.erase(plan.parameters.begin() + 1, plan.parameters.end() - 1);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    plan.Append<Attention>(layer);
    if (layer == 0) {
      plan.Append<RunningSumOf<kSlotRows>>(layer);
    } else {
      plan.Append<GatedMlp>(layer);
    }
  }
  return plan;
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_RUNNING_SUM_H_
