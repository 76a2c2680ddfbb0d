// The differentiable functions of the C++ trainer on LibTorch: isobit's operators with autograd.
// Each has a Python version of the same bits in python/isobit/torch/functional.py, with the shapes.
//
// Activations are bf16 [token rows, ...]. Parameters are bf16, and their gradients fp32
// (KeepFp32Gradient). `packs` are TrainingBatch::packs. The operators check shapes, dtypes and
// devices; errors are c10::Error and say what was expected.
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

// The gradient, in one pass, of a weight that is both embedding and lm_head. lm_head's backward
// pass leaves its share here; the embedding's, which comes later, completes it (C12).
struct TiedGradient : torch::CustomClassHolder {
  Tensor dweight;    // fp32 [vocab, hidden]
  Tensor head_sums;  // fp32 [packs, unique ids, hidden]
};
using TiedGradientPtr = c10::intrusive_ptr<TiedGradient>;

// tied: the one given to LogProbs; null if the table is not also lm_head's weight.
Tensor Embedding(const TrainingBatch& batch, const Tensor& table, const TiedGradientPtr& tied);
Tensor RmsNorm(const Tensor& x, const Tensor& weight, double eps, const Bounds& packs);
// One to three weights, stacked along their rows; as many biases, or none.
Tensor Linear(const Tensor& x, const std::vector<Tensor>& weights,
              const std::vector<Tensor>& biases, const Bounds& packs);
// AddResidual of a row-parallel layer. unit: the columns in a unit of its leaves (C3).
Tensor LinearAdd(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& residual, int64_t unit, const Bounds& packs);
Tensor SwiGlu(const Tensor& gate_up);

struct HeadShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  double eps = 0;  // of the q and k norms
};
// q, k and v from their projection, with both norms or none.
std::tuple<Tensor, Tensor, Tensor> Qkv(const Tensor& qkv, const TrainingBatch& batch,
                                       const Tensor& cosine, const Tensor& sine,
                                       const MaybeTensor& q_norm, const MaybeTensor& k_norm,
                                       const HeadShape& shape);
Tensor Attention(const Tensor& q, const Tensor& k, const Tensor& v, const TrainingBatch& batch,
                 int64_t head_dim, int64_t window);

// Logprobs and entropies of the batch's targets, fp32 [scored rows]. hidden: the scored rows.
// weight: lm_head's.
std::tuple<Tensor, Tensor> LogProbs(const Tensor& hidden, const Tensor& weight,
                                    const TrainingBatch& batch, const TiedGradientPtr& tied);

struct PolicyLossOptions {
  Tensor old_logprobs;        // undefined: policy gradient; else clipped loss
  Tensor reference_logprobs;  // undefined: no KL term
  double clip_low = 0.2;      // at least 0; also clip_high; infinity: not clipped
  double clip_high = 0.2;
  double kl = 0;  // at least 0, finite
};
// The loss of each token times its weight (C14); fp32 [tokens], like all arguments. Differentiable
// in logprobs; any other argument that requires a gradient is refused. With advantages of 1 and no
// options it is the negative log-likelihood.
Tensor TokenLosses(const Tensor& logprobs, const Tensor& advantages, const Tensor& weights,
                   const PolicyLossOptions& options = {});
// The sum of fp32 [n], a scalar, in C5's tree with one value per leaf.
Tensor TreeSum(const Tensor& x);
// The sum of TokenLosses.
Tensor PolicyLoss(const Tensor& logprobs, const Tensor& advantages, const Tensor& weights,
                  const PolicyLossOptions& options = {});

}  // namespace isobit::front

#endif  // ISOBIT_TRAINER_BRIDGE_FRONT_OPS_H_
