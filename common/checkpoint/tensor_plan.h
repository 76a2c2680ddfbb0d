// A model's parameters as one table: the role of each, its names and shapes in the checkpoint, how
// ranks share it, and its form in a weight block. All code that loops over parameters uses this
// table: checks of a checkpoint, a rank's shapes, the layout of blocks, packing, binding, random
// weights and counts. A new architecture adds rows, some of them conditional.
#ifndef ISOBIT_COMMON_CHECKPOINT_TENSOR_PLAN_H_
#define ISOBIT_COMMON_CHECKPOINT_TENSOR_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/checkpoint/dtype.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

// What the forward pass uses a parameter for; a block has at most one of each.
enum class Role : int {
  kEmbedding,
  kInputNorm,
  kQkv,
  kQkvBias,
  kQNorm,
  kKNorm,
  kO,
  kOBias,
  kPostNorm,  // after attention, before the MLP
  kGateUp,
  kGateUpBias,
  kDown,
  kDownBias,
  kFinalNorm,
  kHead,
};

// The operation that reads a parameter. A block holds its parameters in the order of these
// operations; parameters of the same operation are in the table's order.
enum class ParameterOp {
  kEmbedding,  // [vocab, hidden]
  kNorm,       // RMSNorm over a row of activations: [hidden]
  kHeadNorm,   // RMSNorm over each query or key head: [head_dim]
  kLinear,     // [out, in]
  kBias,       // of a linear layer: [out]
};

// How tensor-parallel ranks share a parameter (C4).
enum class Cut {
  kReplicated,      // each rank has all of it
  kColumnParallel,  // each has some rows, that is, computes some outputs
  kRowParallel,     // each has some columns, and computes partial sums of all outputs
};

struct TensorSpec {
  std::string name;            // in a checkpoint of Hugging Face
  std::vector<int64_t> shape;  // matrices are [out, in]

  size_t NumElements() const;
};

// One row of the table.
struct Parameter {
  Role role = Role::kEmbedding;
  ParameterOp op = ParameterOp::kLinear;
  std::vector<TensorSpec> tensors = {};  // of the checkpoint, stacked in this order: q, k, v
  Cut cut = Cut::kReplicated;
  // The rows or columns that `cut` distributes form this many units, one for each KV head, and no
  // unit is split. 0: units of 16 rows or columns.
  int64_t units = 0;
  bool gated = false;  // kLinear: the rows of gate_proj, then those of up_proj
  DType packed =
      DType::kBf16;  // elements in a block; kF32: of values that were rounded to bf16 first
  // Tensors with scales for the elements of `packed`. Always empty, since neither bf16 nor fp32 has
  // scales.
  std::vector<TensorSpec> scales = {};
};

// A tensor that a checkpoint may contain although no parameter needs it: a copy of another one.
struct TiedTensor {
  std::string name;
  std::string same_as;
};

// A tensor that a checkpoint must contain, with the first parameter that it belongs to.
struct ExpectedTensor : TensorSpec {
  Role role = Role::kEmbedding;
  ParameterOp op = ParameterOp::kLinear;
};

struct ModelPlan {
  ModelConfig config;
  // The parameters of embedding, layers and head, each in the order of a forward pass.
  std::vector<std::vector<Parameter>> blocks;
  std::vector<TiedTensor> tied;
};

// Makes the table of a model that ValidateModelConfig accepts.
ModelPlan Describe(const ModelConfig& config);

// The parameter of that role; null: the block has none.
const Parameter* FindParameter(const std::vector<Parameter>& block, Role role);

// Each tensor once, in the order of a forward pass. A tied head is the embedding's tensor.
std::vector<ExpectedTensor> ExpectedTensors(const ModelPlan& plan);

// The number of elements of all tensors; those that two parameters share count once.
uint64_t NumParameters(const ModelPlan& plan);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_TENSOR_PLAN_H_
