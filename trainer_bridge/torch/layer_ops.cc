// Embedding, norms, SwiGLU, q, k and v, attention, with their gradients.
#include <limits>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/contract/attention.h"
#include "trainer_bridge/torch/call.h"
#include "trainer_bridge/torch/operators.h"

namespace isobit::bridge {
namespace {

EmbeddingRows TableOf(const Call& call, const Tensor& unique_ids, const Tensor& starts,
                      const Tensor& rows, int64_t num_rows) {
  EmbeddingRows table;
  table.num_ids = call.Length("unique_ids", unique_ids);
  table.ids = call.In<int32_t>("unique_ids", unique_ids, {table.num_ids});
  table.starts = call.In<int32_t>("starts", starts, {table.num_ids + 1});
  table.rows = call.In<int32_t>("rows", rows, {num_rows});
  call.CheckRange("starts", starts, num_rows + 1);
  call.CheckRange("rows", rows, num_rows);
  return table;
}

EmbeddingGradientArgs EmbeddingGradientOf(const Call& call, const Tensor& dy,
                                          const Tensor& unique_ids, const Tensor& starts,
                                          const Tensor& rows, const Bounds& packs) {
  const auto [num_rows, hidden] = call.MatrixShape("dy", dy);
  EmbeddingGradientArgs a;
  a.dy = call.In<Bf16>("dy", dy, {num_rows, hidden});
  a.hidden = hidden;
  a.table = TableOf(call, unique_ids, starts, rows, num_rows);
  a.packs = call.Packs(packs, num_rows);
  return a;
}

// What Qkv and its gradient have in common.
struct QkvShape {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t columns() const { return (heads + 2 * kv_heads) * head_dim; }
};

TrainingQkvArgs QkvArgsOf(const Call& call, const MaybeTensor& qkv, int64_t rows,
                          const Tensor& positions, const Tensor& cosine, const Tensor& sine,
                          const MaybeTensor& q_norm, const MaybeTensor& k_norm, double eps,
                          const QkvShape& shape) {
  call.Require(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, "heads",
               "a multiple of kv_heads", absl::StrCat(shape.heads, " of ", shape.kv_heads));
  call.Require(q_norm.has_value() == k_norm.has_value(), "k_norm", "both norms or none", "one");
  const int64_t max_positions = call.MatrixShape("cosine", cosine).first;
  TrainingQkvArgs a;
  a.qkv = call.In<Bf16>("qkv", qkv, {rows, shape.columns()});
  a.rows = rows;
  a.positions = call.In<int32_t>("positions", positions, {rows});
  call.CheckRange("positions", positions, max_positions);
  a.heads = static_cast<int32_t>(shape.heads);
  a.kv_heads = static_cast<int32_t>(shape.kv_heads);
  a.head_dim = static_cast<int32_t>(shape.head_dim);
  a.q_norm = call.In<Bf16>("q_norm", q_norm, {shape.head_dim});
  a.k_norm = call.In<Bf16>("k_norm", k_norm, {shape.head_dim});
  a.eps = static_cast<float>(eps);
  a.cosine = call.In<float>("cosine", cosine, {max_positions, shape.head_dim / 2});
  a.sine = call.In<float>("sine", sine, {max_positions, shape.head_dim / 2});
  return a;
}

std::vector<int32_t> SequenceBounds(const Call& call, const Bounds& sequences, int64_t rows) {
  const bool holds = !sequences.empty() && sequences.front() == 0 && sequences.back() <= rows &&
                     rows <= std::numeric_limits<int32_t>::max() &&
                     std::is_sorted(sequences.begin(), sequences.end());
  call.Require(holds, "sequences", absl::StrCat("ascending bounds from 0, at most ", rows),
               "others");
  return {sequences.begin(), sequences.end()};
}

// bounds: of the sequences, which must outlive the result.
TrainingAttentionArgs AttentionArgsOf(const Call& call, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const Tensor& cu_seqlens,
                                      const std::vector<int32_t>& bounds, int64_t head_dim,
                                      int64_t window) {
  const auto [rows, q_columns] = call.MatrixShape("q", q);
  const int64_t kv_columns = call.MatrixShape("k", k).second;
  const bool holds =
      head_dim > 0 && kv_columns > 0 && q_columns % kv_columns == 0 && kv_columns % head_dim == 0;
  call.Require(holds, "q, k", absl::StrCat("columns of whole heads of ", head_dim),
               absl::StrCat(q_columns, " and ", kv_columns));
  call.Require(window >= 0, "window", "at least 0 (0: none)", absl::StrCat(window));
  TrainingAttentionArgs a;
  a.q = call.In<Bf16>("q", q, {rows, q_columns});
  a.k = call.In<Bf16>("k", k, {rows, kv_columns});
  a.v = call.In<Bf16>("v", v, {rows, kv_columns});
  a.rows = rows;
  a.heads = static_cast<int32_t>(q_columns / head_dim);
  a.kv_heads = static_cast<int32_t>(kv_columns / head_dim);
  a.head_dim = static_cast<int32_t>(head_dim);
  a.sequences.bounds = bounds;
  a.sequences.device_bounds =
      call.In<int32_t>("cu_seqlens", cu_seqlens, {static_cast<int64_t>(bounds.size())});
  a.scale = contract::AttentionScale(a.head_dim);
  a.window = window;
  return a;
}

Tensor Embedding(const Tensor& ids, const Tensor& table, const Tensor& unique_ids,
                 const Tensor& starts, const Tensor& rows, const Bounds& packs) {
  const Call call("embedding", table);
  const auto [vocab, hidden] = call.MatrixShape("table", table);
  EmbeddingArgs a;
  a.rows = call.Length("ids", ids);
  a.hidden = hidden;
  a.ids = call.In<int32_t>("ids", ids, {a.rows});
  call.CheckRange("ids", ids, vocab);
  call.Packs(packs, a.rows);
  TableOf(call, unique_ids, starts, rows, a.rows);
  a.table = call.In<Bf16>("table", table, {vocab, hidden});
  Tensor out = call.New<Bf16>({a.rows, hidden}, &a.out);
  call.Run(a);
  return out;
}

Tensor EmbeddingBackward(const Tensor& dy, const Tensor& unique_ids, const Tensor& starts,
                         const Tensor& rows, int64_t vocab, const Bounds& packs) {
  const Call call("embedding_backward", dy);
  EmbeddingGradientArgs a = EmbeddingGradientOf(call, dy, unique_ids, starts, rows, packs);
  call.CheckRange("unique_ids", unique_ids, vocab);
  Tensor dtable = call.NewZeros<float>({vocab, a.hidden}, &a.dtable);
  call.Run(a);
  return dtable;
}

void EmbeddingBackwardTied(const Tensor& dy, const Tensor& unique_ids, const Tensor& starts,
                           const Tensor& rows, const Tensor& head_sums, const Bounds& packs,
                           const Tensor& dtable) {
  const Call call("embedding_backward_tied", dy);
  EmbeddingGradientArgs a = EmbeddingGradientOf(call, dy, unique_ids, starts, rows, packs);
  const int64_t vocab = call.MatrixShape("dtable", dtable).first;
  call.CheckRange("unique_ids", unique_ids, vocab);
  a.head_sums =
      call.In<float>("head_sums", head_sums,
                     {static_cast<int64_t>(a.packs.size()) - 1, a.table.num_ids, a.hidden});
  a.dtable = call.InOut<float>("dtable", dtable, {vocab, a.hidden});
  call.Run(a);
}

Tensor RmsNorm(const Tensor& x, const Tensor& weight, double eps, const Bounds& packs) {
  const Call call("rms_norm", x);
  const auto [rows, columns] = call.MatrixShape("x", x);
  call.Packs(packs, rows);
  RmsNormArgs a;
  // The op writes `residual` only where a sum is added to it.
  a.residual = const_cast<Bf16*>(call.In<Bf16>("x", x, {rows, columns}));
  a.weight = call.In<Bf16>("weight", weight, {columns});
  a.rows = rows;
  a.hidden = columns;
  a.eps = static_cast<float>(eps);
  Tensor out = call.New<Bf16>({rows, columns}, &a.out);
  call.Run(a);
  return out;
}

std::tuple<Tensor, Tensor> RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                           double eps, const Bounds& packs) {
  const Call call("rms_norm_backward", x);
  const auto [rows, columns] = call.MatrixShape("x", x);
  RmsNormGradientArgs a;
  a.x = call.In<Bf16>("x", x, {rows, columns});
  a.weight = call.In<Bf16>("weight", weight, {columns});
  a.dy = call.In<Bf16>("dy", dy, {rows, columns});
  a.columns = columns;
  a.eps = static_cast<float>(eps);
  a.packs = call.Packs(packs, rows);
  Tensor dx = call.New<Bf16>({rows, columns}, &a.dx);
  Tensor dw = call.New<float>({columns}, &a.dw);
  call.Run(a);
  return {dx, dw};
}

Tensor SwiGlu(const Tensor& gate_up) {
  const Call call("swiglu", gate_up);
  const auto [rows, columns] = call.MatrixShape("gate_up", gate_up);
  call.Require(columns % 2 == 0, "gate_up", "an even number of columns", absl::StrCat(columns));
  SwiGluArgs a;
  a.gate_up = call.In<Bf16>("gate_up", gate_up, {rows, columns});
  a.rows = rows;
  a.columns = columns / 2;
  Tensor out = call.New<Bf16>({rows, a.columns}, &a.out);
  call.Run(a);
  return out;
}

Tensor SwiGluBackward(const Tensor& ds, const Tensor& gate_up) {
  const Call call("swiglu_backward", ds);
  const auto [rows, columns] = call.MatrixShape("ds", ds);
  SwiGluGradientArgs a;
  a.gate_up = call.In<Bf16>("gate_up", gate_up, {rows, 2 * columns});
  a.ds = call.In<Bf16>("ds", ds, {rows, columns});
  a.rows = rows;
  a.columns = columns;
  Tensor dgate_up = call.New<Bf16>({rows, 2 * columns}, &a.dgate_up);
  call.Run(a);
  return dgate_up;
}

std::tuple<Tensor, Tensor, Tensor> Qkv(const Tensor& qkv, const Tensor& positions,
                                       const Tensor& cosine, const Tensor& sine,
                                       const MaybeTensor& q_norm, const MaybeTensor& k_norm,
                                       double eps, int64_t heads, int64_t kv_heads,
                                       int64_t head_dim, const Bounds& packs) {
  const Call call("qkv", qkv);
  const int64_t rows = call.MatrixShape("qkv", qkv).first;
  call.Packs(packs, rows);
  TrainingQkvArgs a = QkvArgsOf(call, qkv, rows, positions, cosine, sine, q_norm, k_norm, eps,
                                {heads, kv_heads, head_dim});
  Tensor q = call.New<Bf16>({rows, heads * head_dim}, &a.q);
  Tensor k = call.New<Bf16>({rows, kv_heads * head_dim}, &a.k);
  Tensor v = call.New<Bf16>({rows, kv_heads * head_dim}, &a.v);
  call.Run(a);
  return {q, k, v};
}

std::tuple<Tensor, Tensor, Tensor> QkvBackward(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                               const MaybeTensor& qkv, const Tensor& positions,
                                               const Tensor& cosine, const Tensor& sine,
                                               const MaybeTensor& q_norm, const MaybeTensor& k_norm,
                                               double eps, int64_t heads, int64_t kv_heads,
                                               int64_t head_dim, const Bounds& packs) {
  const Call call("qkv_backward", dq);
  const int64_t rows = call.MatrixShape("dq", dq).first;
  const QkvShape shape = {heads, kv_heads, head_dim};
  call.Require(!q_norm || qkv, "qkv", "the input of the norms", "none");
  QkvGradientArgs a;
  a.forward = QkvArgsOf(call, qkv, rows, positions, cosine, sine, q_norm, k_norm, eps, shape);
  a.dq = call.In<Bf16>("dq", dq, {rows, heads * head_dim});
  a.dk = call.In<Bf16>("dk", dk, {rows, kv_heads * head_dim});
  a.dv = call.In<Bf16>("dv", dv, {rows, kv_heads * head_dim});
  a.packs = call.Packs(packs, rows);
  const Shape norm = {q_norm ? head_dim : 0};
  Tensor dqkv = call.New<Bf16>({rows, shape.columns()}, &a.dqkv);
  Tensor dq_norm = call.New<float>(norm, &a.dq_norm);
  Tensor dk_norm = call.New<float>(norm, &a.dk_norm);
  if (!q_norm) a.dq_norm = a.dk_norm = nullptr;
  call.Run(a);
  return {dqkv, dq_norm, dk_norm};
}

std::tuple<Tensor, Tensor> Attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& cu_seqlens, const Bounds& sequences,
                                     int64_t head_dim, int64_t window) {
  const Call call("attention", q);
  const std::vector<int32_t> bounds =
      SequenceBounds(call, sequences, call.MatrixShape("q", q).first);
  TrainingAttentionArgs a = AttentionArgsOf(call, q, k, v, cu_seqlens, bounds, head_dim, window);
  Tensor out = call.New<Bf16>({a.rows, a.heads * head_dim}, &a.out);
  // Rows of no sequence are not written, and a result must be a function of its arguments.
  Tensor log_sums = call.NewZeros<float>({a.heads, a.rows}, &a.log_sums);
  call.Run(a);
  return {out, log_sums};
}

std::tuple<Tensor, Tensor, Tensor> AttentionBackward(const Tensor& dout, const Tensor& q,
                                                     const Tensor& k, const Tensor& v,
                                                     const Tensor& out, const Tensor& log_sums,
                                                     const Tensor& cu_seqlens,
                                                     const Bounds& sequences, int64_t head_dim,
                                                     int64_t window) {
  const Call call("attention_backward", q);
  const std::vector<int32_t> bounds =
      SequenceBounds(call, sequences, call.MatrixShape("q", q).first);
  AttentionGradientArgs a;
  a.forward = AttentionArgsOf(call, q, k, v, cu_seqlens, bounds, head_dim, window);
  const Shape q_shape = {a.forward.rows, a.forward.heads * head_dim};
  const Shape kv_shape = {a.forward.rows, a.forward.kv_heads * head_dim};
  a.forward.out = const_cast<Bf16*>(call.In<Bf16>("out", out, q_shape));
  a.forward.log_sums =
      const_cast<float*>(call.In<float>("log_sums", log_sums, {a.forward.heads, a.forward.rows}));
  a.dout = call.In<Bf16>("dout", dout, q_shape);
  Tensor dq = call.New<Bf16>(q_shape, &a.dq);
  Tensor dk = call.New<Bf16>(kv_shape, &a.dk);
  Tensor dv = call.New<Bf16>(kv_shape, &a.dv);
  call.Run(a);
  return {dq, dk, dv};
}

constexpr Operator kOperators[] = {
    {"embedding(Tensor ids, Tensor table, Tensor unique_ids, Tensor starts, Tensor rows,"
     " int[] packs) -> Tensor",
     TORCH_BOX(&Embedding), "bf16(ids.shape[0], table.shape[1])"},
    {"embedding_backward(Tensor dy, Tensor unique_ids, Tensor starts, Tensor rows, int vocab,"
     " int[] packs) -> Tensor",
     TORCH_BOX(&EmbeddingBackward), "fp32(vocab, dy.shape[1])"},
    {"embedding_backward_tied(Tensor dy, Tensor unique_ids, Tensor starts, Tensor rows,"
     " Tensor head_sums, int[] packs, Tensor(a!) dtable) -> ()",
     TORCH_BOX(&EmbeddingBackwardTied), "None"},
    {"rms_norm(Tensor x, Tensor weight, float eps, int[] packs) -> Tensor", TORCH_BOX(&RmsNorm),
     "like(x)"},
    {"rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps, int[] packs)"
     " -> (Tensor, Tensor)",
     TORCH_BOX(&RmsNormBackward), "like(x), fp32(*weight.shape)"},
    {"swiglu(Tensor gate_up) -> Tensor", TORCH_BOX(&SwiGlu),
     "bf16(gate_up.shape[0], gate_up.shape[1] // 2)"},
    {"swiglu_backward(Tensor ds, Tensor gate_up) -> Tensor", TORCH_BOX(&SwiGluBackward),
     "like(gate_up)"},
    {"qkv(Tensor qkv, Tensor positions, Tensor cosine, Tensor sine, Tensor? q_norm,"
     " Tensor? k_norm, float eps, int heads, int kv_heads, int head_dim, int[] packs)"
     " -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&Qkv),
     "bf16(qkv.shape[0], heads * head_dim), bf16(qkv.shape[0], kv_heads * head_dim),"
     " bf16(qkv.shape[0], kv_heads * head_dim)"},
    {"qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, Tensor positions, Tensor cosine,"
     " Tensor sine, Tensor? q_norm, Tensor? k_norm, float eps, int heads, int kv_heads,"
     " int head_dim, int[] packs) -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&QkvBackward),
     "bf16(dq.shape[0], (heads + 2 * kv_heads) * head_dim),"
     " fp32(0 if q_norm is None else head_dim), fp32(0 if k_norm is None else head_dim)"},
    {"attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int[] sequences, int head_dim,"
     " int window) -> (Tensor out, Tensor log_sums)",
     TORCH_BOX(&Attention), "like(q), fp32(q.shape[1] // head_dim, q.shape[0])"},
    {"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums,"
     " Tensor cu_seqlens, int[] sequences, int head_dim, int window) -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&AttentionBackward), "like(q), like(k), like(v)"},
};

}  // namespace

ISOBIT_OPERATORS(kOperators)

}  // namespace isobit::bridge
