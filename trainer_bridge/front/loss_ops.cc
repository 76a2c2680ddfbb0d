// The embedding, lm_head's logprobs and the losses, with autograd.
#include <utility>
#include <vector>

#include "trainer_bridge/front/operator.h"
#include "trainer_bridge/front/ops.h"

namespace isobit::front {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// A node of the graph keeps a TiedGradient in its saved data under this key, if it has one.
constexpr char kTied[] = "tied";

void Keep(AutogradContext* ctx, const TiedGradientPtr& tied) {
  if (tied != nullptr) ctx->saved_data[kTied] = c10::IValue::make_capsule(tied);
}
TiedGradient* Kept(AutogradContext* ctx) {
  const auto found = ctx->saved_data.find(kTied);
  if (found == ctx->saved_data.end()) return nullptr;
  return static_cast<TiedGradient*>(found->second.toCapsule().get());
}

// lm_head's rows and how their tokens were drawn: the first arguments of both its operators.
using HeadSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                         const Tensor&, const MaybeTensor&,
                                                         const MaybeTensor&, const MaybeTensor&,
                                                         const MaybeTensor&, int64_t,
                                                         c10::IntArrayRef);
using HeadGradientSignature = std::tuple<Tensor, Tensor>(const Tensor&, const MaybeTensor&,
                                                         const Tensor&, const Tensor&,
                                                         const Tensor&, const MaybeTensor&,
                                                         const MaybeTensor&, const MaybeTensor&,
                                                         const MaybeTensor&, const Tensor&,
                                                         int64_t);

// Rows of logits that exist at a time. Changes no bit.
constexpr int64_t kBlockRows = 2048;

// The balanced tree over tensors that come one after the other, 2^n in all.
class TreeCounter {
 public:
  void Add(Tensor t) {
    int64_t size = 1;
    while (!levels_.empty() && levels_.back().first == size) {
      t = levels_.back().second.add_(t);
      levels_.pop_back();
      size *= 2;
    }
    levels_.emplace_back(size, std::move(t));
  }
  Tensor Total() const { return levels_.front().second; }

 private:
  std::vector<std::pair<int64_t, Tensor>> levels_;  // how many tensors a sum has, biggest first
};

struct LogProbsNode : Function<LogProbsNode> {
  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight,
                               const TrainingBatch& batch, const TiedGradientPtr& tied) {
    static const auto op = Operator<HeadSignature>("logprobs");
    const RowSamplingTensors& s = batch.sampling;
    auto [logprobs, entropies, state] =
        op.call(hidden, weight, batch.targets, Maybe(s.temperature), Maybe(s.top_k), Maybe(s.top_p),
                Maybe(s.min_p), kBlockRows, batch.scored_packs);
    // A loss without entropies then computes no gradient of them.
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({hidden, weight, batch.targets, s.temperature, s.top_k, s.top_p, s.min_p,
                            state, batch.unique_ids});
    ctx->saved_data["packs"] = batch.scored_packs;
    Keep(ctx, tied);
    return {logprobs, entropies};
  }
  static variable_list backward(AutogradContext* ctx, variable_list d) {
    static const auto op = Operator<HeadGradientSignature>("logprobs_backward");
    const variable_list s = ctx->get_saved_variables();
    const Bounds packs = ctx->saved_data["packs"].toIntVector();
    const Tensor ids = s[8].to(torch::kInt64);
    const Tensor dlogprobs = d[0].defined() ? d[0] : torch::zeros_like(d[1]);
    TiedGradient* tied = Kept(ctx);
    std::vector<Tensor> dhidden, head_sums;
    TreeCounter dweight;
    for (size_t p = 0; p + 1 < packs.size(); ++p) {
      const auto rows = [&](const Tensor& t) {
        return t.defined() ? t.slice(0, packs[p], packs[p + 1]).contiguous() : t;
      };
      auto [dx, dw] = op.call(rows(dlogprobs), Maybe(rows(d[1])), rows(s[0]), s[1], rows(s[2]),
                              Maybe(rows(s[3])), Maybe(rows(s[4])), Maybe(rows(s[5])),
                              Maybe(rows(s[6])), rows(s[7]), kBlockRows);
      dhidden.push_back(dx);
      if (tied != nullptr) head_sums.push_back(dw.index_select(0, ids));
      dweight.Add(dw);
    }
    Tensor total = dweight.Total();
    if (tied != nullptr) {
      tied->dweight = std::exchange(total, Tensor());
      tied->head_sums = torch::stack(head_sums);
    }
    return {torch::cat(dhidden), total, Tensor(), Tensor()};
  }
};

struct EmbeddingNode : Function<EmbeddingNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& table, const TrainingBatch& batch,
                        const TiedGradientPtr& tied) {
    static const auto op =
        Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        c10::IntArrayRef)>("embedding");
    ctx->save_for_backward({batch.unique_ids, batch.starts, batch.rows_by_id});
    ctx->saved_data["vocab"] = table.size(0);
    ctx->saved_data["packs"] = batch.packs;
    Keep(ctx, tied);
    return op.call(batch.ids, table, batch.unique_ids, batch.starts, batch.rows_by_id, batch.packs);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    static const auto own =
        Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                        c10::IntArrayRef)>("embedding_backward");
    static const auto shared =
        Operator<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      c10::IntArrayRef, Tensor&)>("embedding_backward_tied");
    const variable_list s = ctx->get_saved_variables();
    const Bounds packs = ctx->saved_data["packs"].toIntVector();
    const Tensor d = dy[0].contiguous();
    TiedGradient* tied = Kept(ctx);
    Tensor dtable = tied == nullptr ? Tensor() : std::exchange(tied->dweight, Tensor());
    if (dtable.defined()) {
      shared.call(d, s[0], s[1], s[2], std::exchange(tied->head_sums, Tensor()), packs, dtable);
    } else {
      dtable = own.call(d, s[0], s[1], s[2], ctx->saved_data["vocab"].toInt(), packs);
    }
    return {dtable, Tensor(), Tensor()};
  }
};

struct TokenLossesNode : Function<TokenLossesNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& logprobs, const Tensor& advantages,
                        const Tensor& weights, const PolicyLossOptions& o) {
    static const auto op = Operator<std::tuple<Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, double,
        double, double)>("policy_loss");
    auto [values, gradients] = op.call(logprobs, advantages, weights, Maybe(o.old_logprobs),
                                       Maybe(o.reference_logprobs), o.clip_low, o.clip_high, o.kl);
    ctx->save_for_backward({gradients});
    return values;
  }
  static variable_list backward(AutogradContext* ctx, variable_list d) {
    return {ctx->get_saved_variables()[0] * d[0], Tensor(), Tensor(), Tensor()};
  }
};

struct TreeSumNode : Function<TreeSumNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    static const auto op = Operator<Tensor(const Tensor&)>("tree_sum");
    ctx->saved_data["count"] = x.size(0);
    return op.call(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list d) {
    return {d[0].expand({ctx->saved_data["count"].toInt()})};
  }
};

// The loss has none with regard to t, and would leave it undefined.
void RefuseGradient(const char* name, const Tensor& t) {
  TORCH_CHECK_VALUE(
      !t.defined() || !t.requires_grad() || !torch::GradMode::is_enabled(), name,
      ": expected a tensor that requires no gradient (detach() it), got one that does");
}

}  // namespace

Tensor Embedding(const TrainingBatch& batch, const Tensor& table, const TiedGradientPtr& tied) {
  return EmbeddingNode::apply(table, batch, tied);
}

std::tuple<Tensor, Tensor> LogProbs(const Tensor& hidden, const Tensor& weight,
                                    const TrainingBatch& batch, const TiedGradientPtr& tied) {
  const variable_list out = LogProbsNode::apply(hidden, weight, batch, tied);
  return {out[0], out[1]};
}

Tensor TokenLosses(const Tensor& logprobs, const Tensor& advantages, const Tensor& weights,
                   const PolicyLossOptions& options) {
  RefuseGradient("advantages", advantages);
  RefuseGradient("weights", weights);
  RefuseGradient("old_logprobs", options.old_logprobs);
  RefuseGradient("reference_logprobs", options.reference_logprobs);
  return TokenLossesNode::apply(logprobs, advantages, weights, options);
}

Tensor TreeSum(const Tensor& x) { return TreeSumNode::apply(x); }

Tensor PolicyLoss(const Tensor& logprobs, const Tensor& advantages, const Tensor& weights,
                  const PolicyLossOptions& options) {
  return TreeSum(TokenLosses(logprobs, advantages, weights, options));
}

}  // namespace isobit::front
