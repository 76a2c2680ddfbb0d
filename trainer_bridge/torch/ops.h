// The ops as functions over tensors: each checks its arguments, allocates its results and calls one
// op of OpTable (several where a comment says so). schemas.cc has the schemas;
// python/isobit/torch/functional.py documents the ops.
#ifndef ISOBIT_TRAINER_BRIDGE_TORCH_OPS_H_
#define ISOBIT_TRAINER_BRIDGE_TORCH_OPS_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "trainer_bridge/torch/call.h"

namespace isobit::bridge {

using Bounds = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

// ---- layer_ops.cc

Tensor Embedding(const Tensor& ids, const Tensor& table, const Tensor& unique_ids,
                 const Tensor& starts, const Tensor& rows, const Bounds& packs);
Tensor EmbeddingBackward(const Tensor& dy, const Tensor& unique_ids, const Tensor& starts,
                         const Tensor& rows, int64_t vocab, const Bounds& packs);
void EmbeddingBackwardTied(const Tensor& dy, const Tensor& unique_ids, const Tensor& starts,
                           const Tensor& rows, const Tensor& head_sums, const Bounds& packs,
                           const Tensor& dtable);

Tensor RmsNorm(const Tensor& x, const Tensor& weight, double eps, const Bounds& packs);
std::tuple<Tensor, Tensor> RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                           double eps, const Bounds& packs);

Tensor SwiGlu(const Tensor& gate_up);
Tensor SwiGluBackward(const Tensor& ds, const Tensor& gate_up);

std::tuple<Tensor, Tensor, Tensor> Qkv(const Tensor& qkv, const Tensor& positions,
                                       const Tensor& cosine, const Tensor& sine,
                                       const MaybeTensor& q_norm, const MaybeTensor& k_norm,
                                       double eps, int64_t heads, int64_t kv_heads,
                                       int64_t head_dim, const Bounds& packs);
std::tuple<Tensor, Tensor, Tensor> QkvBackward(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                               const MaybeTensor& qkv, const Tensor& positions,
                                               const Tensor& cosine, const Tensor& sine,
                                               const MaybeTensor& q_norm, const MaybeTensor& k_norm,
                                               double eps, int64_t heads, int64_t kv_heads,
                                               int64_t head_dim, const Bounds& packs);

std::tuple<Tensor, Tensor> Attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& cu_seqlens, const Bounds& sequences,
                                     int64_t head_dim, int64_t window);
std::tuple<Tensor, Tensor, Tensor> AttentionBackward(const Tensor& dout, const Tensor& q,
                                                     const Tensor& k, const Tensor& v,
                                                     const Tensor& out, const Tensor& log_sums,
                                                     const Tensor& cu_seqlens,
                                                     const Bounds& sequences, int64_t head_dim,
                                                     int64_t window);

// ---- linear_ops.cc

Tensor Linear(const Tensor& x, const Tensors& weights, const Tensors& biases, const Bounds& packs);
Tensor LinearAdd(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& residual, int64_t unit, const Bounds& packs);
Tensor LinearBackwardInput(const Tensor& dy, const Tensors& weights);
Tensors LinearBackwardWeights(const Tensor& dy, const Tensor& x, const std::vector<int64_t>& rows,
                              const Bounds& packs);
Tensor ColumnSums(const Tensor& x, const Bounds& packs);

// ---- log_prob_ops.cc

Tensor Logits(const Tensor& hidden, const Tensor& weight);
// Two ops for each block of `block_rows` rows: the logits, then their logprobs.
std::tuple<Tensor, Tensor, Tensor> LogProbs(const Tensor& hidden, const Tensor& weight,
                                            const Tensor& targets, const MaybeTensor& temperature,
                                            const MaybeTensor& top_k, const MaybeTensor& top_p,
                                            const MaybeTensor& min_p, int64_t block_rows,
                                            const Bounds& packs);
// The rows of one pack. Four ops per block: logits, then the gradients of logits, input, weight.
std::tuple<Tensor, Tensor> LogProbsBackward(const Tensor& dlogprobs, const MaybeTensor& dentropies,
                                            const Tensor& hidden, const Tensor& weight,
                                            const Tensor& targets, const MaybeTensor& temperature,
                                            const MaybeTensor& top_k, const MaybeTensor& top_p,
                                            const MaybeTensor& min_p, const Tensor& state,
                                            int64_t block_rows);

// ---- loss_ops.cc

std::tuple<Tensor, Tensor> PolicyLoss(const Tensor& logprobs, const Tensor& advantages,
                                      const Tensor& weights, const MaybeTensor& old_logprobs,
                                      const MaybeTensor& reference_logprobs, double clip_low,
                                      double clip_high, double kl);
// function: exp, log, sigmoid or log_sigmoid. Returns values and gradients.
std::tuple<Tensor, Tensor> LossFunction(const Tensor& x, const std::string& function);
Tensor TreeSum(const Tensor& x);
Tensor SequenceSums(const Tensor& x, const Tensor& bounds);

// ---- model_ops.cc

std::string ModelFacts(const std::string& config_json, const std::string& ignored_fields);
std::tuple<Tensor, Tensor> RopeTable(const std::string& config_json, int64_t positions);

// ---- optimizer_ops.cc

Tensor SquareSums(const Tensor& x);
Tensor WeightSums(const Tensor& block, int64_t tensor_columns, int64_t first_row,
                  int64_t first_column);
Tensor TreeSum64(const Tensor& x);
void AdamW(const Tensor& parameter, const Tensor& m, const Tensor& v, const Tensor& gradient,
           const MaybeTensor& working, const std::vector<double>& factors);
void Dither(const Tensor& out, const Tensor& x, int64_t step, int64_t moment, int64_t first);

}  // namespace isobit::bridge

#endif  // ISOBIT_TRAINER_BRIDGE_TORCH_OPS_H_
