// A model's parameters as one table: the names and shapes of each in the checkpoint, how ranks
// share it, and its form in a weight block. All code that loops over parameters uses this table:
// checks of a checkpoint, a rank's shapes, the layout of blocks, packing, binding, random weights
// and counts. The blocks of kernels/blocks write its rows.
#ifndef ISOBIT_COMMON_CHECKPOINT_TENSOR_PLAN_H_
#define ISOBIT_COMMON_CHECKPOINT_TENSOR_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/checkpoint/dtype.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

// A parameter's place among those of its block.
using ParameterIndex = int;
inline constexpr ParameterIndex kNoParameter = -1;

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
  std::string name;  // such as "qkv"; a block has one of each name
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

// A tensor that a checkpoint must contain, with the operation of the first parameter that it
// belongs to.
struct ExpectedTensor : TensorSpec {
  ParameterOp op = ParameterOp::kLinear;
};

// The parameters of one block. Each method adds a row and returns its index, or kNoParameter if the
// model has no such parameter.
class ParameterTable {
 public:
  // The tensors are called "<prefix><module>.weight" and ".bias".
  explicit ParameterTable(std::string prefix = "") : prefix_(std::move(prefix)) {}

  ParameterIndex Embedding(std::string name, absl::string_view module, std::vector<int64_t> shape);
  ParameterIndex Norm(std::string name, absl::string_view module, int64_t size);
  ParameterIndex HeadNorm(std::string name, absl::string_view module, int64_t size, bool exists);
  // The tensors of `weight` are named by their modules.
  ParameterIndex Linear(Parameter weight);
  // The bias of a linear layer's outputs. Each rank of a row-parallel layer has the whole bias.
  ParameterIndex Bias(ParameterIndex weight, bool exists);

  const std::vector<Parameter>& rows() const { return rows_; }

 private:
  ParameterIndex Add(Parameter row);
  std::string NameOf(absl::string_view module, absl::string_view kind) const;

  std::string prefix_;
  std::vector<Parameter> rows_;
};

// What a model needs of a checkpoint. Which blocks a model has, and how they compute, is in
// kernels/model/model_plan.h.
struct TensorPlan {
  ModelConfig config;
  // The parameters of each block in the order of a forward pass: the embedding, the blocks of the
  // layers, the head.
  std::vector<std::vector<Parameter>> parameters;
  std::vector<TiedTensor> tied;
};

// The parameter of that name; null: the block has none.
const Parameter* FindParameter(const std::vector<Parameter>& block, absl::string_view name);

// Each tensor once, in the order of a forward pass. A tied head is the embedding's tensor.
std::vector<ExpectedTensor> ExpectedTensors(const TensorPlan& plan);

// The number of elements of all tensors; those that two parameters share count once.
uint64_t NumParameters(const TensorPlan& plan);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_TENSOR_PLAN_H_
