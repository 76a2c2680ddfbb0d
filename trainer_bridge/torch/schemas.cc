// The names and schemas of the ops, and their registration with PyTorch.
#include <torch/csrc/stable/library.h>

#include "trainer_bridge/torch/ops.h"

namespace isobit::bridge {
namespace {

STABLE_TORCH_LIBRARY(isobit, m) {
  m.def(
      "embedding(Tensor ids, Tensor table, Tensor unique_ids, Tensor starts, Tensor rows,"
      " int[] packs) -> Tensor");
  m.def(
      "embedding_backward(Tensor dy, Tensor unique_ids, Tensor starts, Tensor rows, int vocab,"
      " int[] packs) -> Tensor");
  m.def(
      "embedding_backward_tied(Tensor dy, Tensor unique_ids, Tensor starts, Tensor rows,"
      " Tensor head_sums, int[] packs, Tensor(a!) dtable) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, int[] packs) -> Tensor");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps, int[] packs)"
      " -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor ds, Tensor gate_up) -> Tensor");
  m.def(
      "qkv(Tensor qkv, Tensor positions, Tensor cosine, Tensor sine, Tensor? q_norm,"
      " Tensor? k_norm, float eps, int heads, int kv_heads, int head_dim, int[] packs)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, Tensor positions, Tensor cosine,"
      " Tensor sine, Tensor? q_norm, Tensor? k_norm, float eps, int heads, int kv_heads,"
      " int head_dim, int[] packs) -> (Tensor, Tensor, Tensor)");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int[] sequences, int head_dim,"
      " int window) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums,"
      " Tensor cu_seqlens, int[] sequences, int head_dim, int window) -> (Tensor, Tensor, Tensor)");
  m.def("linear(Tensor x, Tensor[] weights, Tensor[] biases, int[] packs) -> Tensor");
  m.def(
      "linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual, int unit, int[] packs)"
      " -> Tensor");
  m.def("linear_backward_input(Tensor dy, Tensor[] weights) -> Tensor");
  m.def("linear_backward_weights(Tensor dy, Tensor x, int[] rows, int[] packs) -> Tensor[]");
  m.def("column_sums(Tensor x, int[] packs) -> Tensor");
  m.def("logits(Tensor hidden, Tensor weight) -> Tensor");
  m.def(
      "logprobs(Tensor hidden, Tensor weight, Tensor targets, Tensor? temperature, Tensor? top_k,"
      " Tensor? top_p, Tensor? min_p, int block_rows, int[] packs) -> (Tensor, Tensor, Tensor)");
  m.def(
      "logprobs_backward(Tensor dlogprobs, Tensor? dentropies, Tensor hidden, Tensor weight,"
      " Tensor targets, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p,"
      " Tensor state, int block_rows) -> (Tensor, Tensor)");
  m.def(
      "policy_loss(Tensor logprobs, Tensor advantages, Tensor weights, Tensor? old_logprobs,"
      " Tensor? reference_logprobs, float clip_low, float clip_high, float kl)"
      " -> (Tensor, Tensor)");
  m.def("loss_function(Tensor x, str function) -> (Tensor, Tensor)");
  m.def("tree_sum(Tensor x) -> Tensor");
  m.def("sequence_sums(Tensor x, Tensor bounds) -> Tensor");
  m.def("square_sums(Tensor x) -> Tensor");
  m.def("weight_sums(Tensor block, int tensor_columns, int first_row, int first_column) -> Tensor");
  m.def("tree_sum64(Tensor x) -> Tensor");
  m.def(
      "adamw(Tensor(a!) parameter, Tensor(b!) m, Tensor(c!) v, Tensor gradient,"
      " Tensor(d!)? working, float[] factors) -> ()");
  m.def("dither(Tensor(a!) out, Tensor x, int step, int moment, int first) -> ()");
  m.def("model_facts(str config_json, str ignored_fields) -> str");
  m.def("rope_table(str config_json, int positions) -> (Tensor, Tensor)");
}

void Register(torch::stable::detail::StableLibrary& m) {
  m.impl("embedding", TORCH_BOX(&Embedding));
  m.impl("embedding_backward", TORCH_BOX(&EmbeddingBackward));
  m.impl("embedding_backward_tied", TORCH_BOX(&EmbeddingBackwardTied));
  m.impl("rms_norm", TORCH_BOX(&RmsNorm));
  m.impl("rms_norm_backward", TORCH_BOX(&RmsNormBackward));
  m.impl("swiglu", TORCH_BOX(&SwiGlu));
  m.impl("swiglu_backward", TORCH_BOX(&SwiGluBackward));
  m.impl("qkv", TORCH_BOX(&Qkv));
  m.impl("qkv_backward", TORCH_BOX(&QkvBackward));
  m.impl("attention", TORCH_BOX(&Attention));
  m.impl("attention_backward", TORCH_BOX(&AttentionBackward));
  m.impl("linear", TORCH_BOX(&Linear));
  m.impl("linear_add", TORCH_BOX(&LinearAdd));
  m.impl("linear_backward_input", TORCH_BOX(&LinearBackwardInput));
  m.impl("linear_backward_weights", TORCH_BOX(&LinearBackwardWeights));
  m.impl("column_sums", TORCH_BOX(&ColumnSums));
  m.impl("logits", TORCH_BOX(&Logits));
  m.impl("logprobs", TORCH_BOX(&LogProbs));
  m.impl("logprobs_backward", TORCH_BOX(&LogProbsBackward));
  m.impl("policy_loss", TORCH_BOX(&PolicyLoss));
  m.impl("loss_function", TORCH_BOX(&LossFunction));
  m.impl("tree_sum", TORCH_BOX(&TreeSum));
  m.impl("sequence_sums", TORCH_BOX(&SequenceSums));
  m.impl("square_sums", TORCH_BOX(&SquareSums));
  m.impl("weight_sums", TORCH_BOX(&WeightSums));
  m.impl("tree_sum64", TORCH_BOX(&TreeSum64));
  m.impl("adamw", TORCH_BOX(&AdamW));
  m.impl("dither", TORCH_BOX(&Dither));
}

STABLE_TORCH_LIBRARY_IMPL(isobit, CPU, m) { Register(m); }
STABLE_TORCH_LIBRARY_IMPL(isobit, CUDA, m) { Register(m); }
// Without tensors among the arguments there is no device to choose by.
STABLE_TORCH_LIBRARY_IMPL(isobit, CompositeExplicitAutograd, m) {
  m.impl("model_facts", TORCH_BOX(&ModelFacts));
  m.impl("rope_table", TORCH_BOX(&RopeTable));
}

}  // namespace
}  // namespace isobit::bridge
