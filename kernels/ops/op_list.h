// Every op, once. An op is a struct of arguments, NAMEArgs in this folder, and for each backend one
// function that computes it. What needs all ops, such as a backend's table or a decorator, is made
// of this list.
//
// In the structs, pointers are raw and belong to the caller. They are to the backend's memory
// unless they say host. Matrices are row-major with a leading dimension in elements; bf16 is its
// bit pattern in uint16_t. Ops do not check again what the caller has already checked.
#ifndef ISOBIT_KERNELS_OPS_OP_LIST_H_
#define ISOBIT_KERNELS_OPS_OP_LIST_H_

#include <cstddef>

// First the forward ops of serving, then those of training (NUMERICS.md, C10 to C15): forward ops
// on tensors as a trainer holds them, gradients, the optimizer.
#define ISOBIT_OPS(X)  \
  X(Linear)            \
  X(Embedding)         \
  X(RmsNorm)           \
  X(SwiGlu)            \
  X(Qkv)               \
  X(Attention)         \
  X(CopyPages)         \
  X(Reduce)            \
  X(LogProbs)          \
  X(StackedLinear)     \
  X(InputGradient)     \
  X(WeightGradient)    \
  X(ColumnSums)        \
  X(RmsNormGradient)   \
  X(SwiGluGradient)    \
  X(TrainingQkv)       \
  X(QkvGradient)       \
  X(EmbeddingGradient) \
  X(TrainingAttention) \
  X(AttentionGradient) \
  X(TrainingLogProbs)  \
  X(LogProbGradient)   \
  X(PolicyLoss)        \
  X(LossFunction)      \
  X(TreeSum)           \
  X(SequenceSums)      \
  X(SquareSums)        \
  X(TreeSum64)         \
  X(AdamW)             \
  X(Dither)            \
  X(WeightSums)

namespace isobit {

enum class Op {
#define ISOBIT_OP(Name) k##Name,
  ISOBIT_OPS(ISOBIT_OP)
#undef ISOBIT_OP
};

inline constexpr const char* kOpNames[] = {
#define ISOBIT_OP(Name) #Name,
    ISOBIT_OPS(ISOBIT_OP)
#undef ISOBIT_OP
};
inline constexpr size_t kNumOps = sizeof(kOpNames) / sizeof(kOpNames[0]);

// The op whose arguments these are.
template <typename Args>
struct OpOf;

#define ISOBIT_OP(Name)                      \
  struct Name##Args;                         \
  template <>                                \
  struct OpOf<Name##Args> {                  \
    static constexpr Op value = Op::k##Name; \
  };
ISOBIT_OPS(ISOBIT_OP)
#undef ISOBIT_OP

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_OP_LIST_H_
