// The differentiable functions of the C++ front on LibTorch: isobit's operators with autograd. Each
// has a Python twin of the same bits in python/isobit/torch/functional.py, which gives the shapes.
//
// Activations are bf16 [token rows, ...]; parameters are bf16, and their gradients fp32
// (KeepFp32Gradient). `packs` are TrainingBatch::packs. The operators check shapes, dtypes and
// devices; errors are c10::Error with what was expected.
#ifndef ISOBIT_TRAINER_BRIDGE_FRONT_OPS_H_
#define ISOBIT_TRAINER_BRIDGE_FRONT_OPS_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "trainer_bridge/front/batch.h"

namespace isobit::front {

using torch::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Lets autograd keep the gradient of a bf16 leaf in fp32.
inline void KeepFp32Gradient(const Tensor& parameter) { parameter.set_grad_dtype(torch::kFloat32); }

// The gradient of a weight that is both embedding and lm_head, of one pass: lm_head's backward pass
// leaves its part here, and the embedding's, which comes later, finishes it (C12).
struct TiedGradient : torch::CustomClassHolder {
  Tensor dweight;    // fp32 [vocab, hidden]
  Tensor head_sums;  // fp32 [packs, unique ids, hidden]
};
using TiedGradientPtr = c10::intrusive_ptr<TiedGradient>;

// tied: as given to LogProbs; null for a table that is not lm_head's weight.
Tensor Embedding(const TrainingBatch& batch, const Tensor& table, const TiedGradientPtr& tied);
Tensor RmsNorm(const Tensor& x, const Tensor& weight, double eps, const Bounds& packs);
// One to three weights (and biases, one for each or none), one below the other.
Tensor Linear(const Tensor& x, const std::vector<Tensor>& weights,
              const std::vector<Tensor>& biases, const Bounds& packs);
// AddResidual of a row-parallel layer. unit: columns in a unit of its leaves (C3).
Tensor LinearAdd(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& residual, int64_t unit, const Bounds& packs);
Tensor SwiGlu(const Tensor& gate_up);

struct HeadShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  double eps = 0;  // of the q and k norms
};
// q, k and v from their projection; both norms or none.
std::tuple<Tensor, Tensor, Tensor> Qkv(const Tensor& qkv, const TrainingBatch& batch,
                                       const Tensor& cosine, const Tensor& sine,
                                       const MaybeTensor& q_norm, const MaybeTensor& k_norm,
                                       const HeadShape& shape);
Tensor Attention(const Tensor& q, const Tensor& k, const Tensor& v, const TrainingBatch& batch,
                 int64_t head_dim, int64_t window);

// Logprobs and entropies of the batch's targets, fp32 [scored rows]. hidden: of the scored rows.
// weight: lm_head's.
std::tuple<Tensor, Tensor> LogProbs(const Tensor& hidden, const Tensor& weight,
                                    const TrainingBatch& batch, const TiedGradientPtr& tied);

struct PolicyLossOptions {
  Tensor old_logprobs;        // undefined: the policy gradient; else the clipped loss
  Tensor reference_logprobs;  // undefined: no KL term
  double clip_low = 0.2;      // at least 0, as clip_high; infinity: not clipped
  double clip_high = 0.2;
  double kl = 0;  // at least 0, finite
};
// The loss of each token times its weight (C14), fp32 [tokens], as all arguments; differentiable in
// logprobs; another argument that requires a gradient is refused. Advantages of 1 without options
// give the negative log-likelihood.
Tensor TokenLosses(const Tensor& logprobs, const Tensor& advantages, const Tensor& weights,
                   const PolicyLossOptions& options = {});
// The sum of fp32 [n] in C5's tree with one value a leaf, a scalar.
Tensor TreeSum(const Tensor& x);
// The sum of TokenLosses.
Tensor PolicyLoss(const Tensor& logprobs, const Tensor& advantages, const Tensor& weights,
                  const PolicyLossOptions& options = {});

}  // namespace isobit::front

#endif  // ISOBIT_TRAINER_BRIDGE_FRONT_OPS_H_
