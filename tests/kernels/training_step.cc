// Forward, loss, backward and update, op by op.
#include "tests/kernels/training_step.h"

#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/portable.h"

namespace isobit::testing_support {
namespace {

constexpr int64_t kHidden = 128;
constexpr int64_t kMiddle = 208;
constexpr int64_t kVocab = 248;
constexpr int32_t kHeads = 4;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kHeadDim = 64;
constexpr int64_t kQ = int64_t{kHeads} * kHeadDim;
constexpr int64_t kKv = int64_t{kKvHeads} * kHeadDim;
constexpr int64_t kTokens = 120;  // with a logprob: the first rows
constexpr float kEps = 1e-6f;
constexpr int32_t kBounds[] = {0, 70, 150};  // of the sequences

// Arrays in the step's memory.
class Arrays {
 public:
  explicit Arrays(const StepMemory& memory) : memory_(memory) {}

  template <typename T>
  T* Zeros(int64_t n) {
    return reinterpret_cast<T*>(memory_.allocate(static_cast<size_t>(n) * sizeof(T)));
  }
  template <typename T>
  T* Copy(const std::vector<T>& values) {
    T* const data = Zeros<T>(static_cast<int64_t>(values.size()));
    std::copy(values.begin(), values.end(), data);
    return data;
  }
  Bf16* Normal(int64_t n, float scale) {
    std::vector<Bf16> values = RandomBf16(Family::kNormal, n, random_);
    for (Bf16& value : values) {
      value = contract::FloatToBf16(contract::Bf16ToFloat(value) * scale);
    }
    return Copy(values);
  }
  float* NormalFloats(int64_t n) { return Copy(RandomFloats(Family::kNormal, n, random_)); }
  // An array whose bits are a result.
  template <typename T>
  T* Result(const std::string& name, int64_t n) {
    T* const data = Zeros<T>(n);
    results_.push_back([name, data, n](Bits* bits) {
      bits->Add(name, std::span<const T>(data, static_cast<size_t>(n)));
    });
    return data;
  }
  Bits Results() const {
    memory_.wait();
    Bits bits;
    for (const auto& add : results_) add(&bits);
    return bits;
  }
  void Wait() const { memory_.wait(); }

 private:
  const StepMemory& memory_;
  Random random_{7};
  std::vector<std::function<void(Bits*)>> results_;
};

void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

struct Layer {
  std::string name;
  StackedWeight weight;
  contract::LeafPlan leaves;
  contract::LeafSum sum = contract::LeafSum::kChain;
};

class Step {
 public:
  Step(OpTable& ops, std::vector<int64_t> packs, const StepMemory& memory)
      : ops_(ops), packs_(std::move(packs)), arrays_(memory) {
    std::vector<int32_t> ids(kStepRows);
    std::vector<int32_t> positions(kStepRows);
    for (int32_t r = 0; r < kStepRows; ++r) {
      ids[static_cast<size_t>(r)] = r * r % 5;
      positions[static_cast<size_t>(r)] = r < kBounds[1] ? r : r - kBounds[1];
    }
    ids_ = arrays_.Copy(ids);
    positions_ = arrays_.Copy(positions);
    std::vector<float> cosine;
    std::vector<float> sine;
    for (int64_t i = 0; i < kStepRows * kHeadDim / 2; ++i) {
      cosine.push_back(std::cos(0.01f * static_cast<float>(i)));
      sine.push_back(std::sin(0.01f * static_cast<float>(i)));
    }
    cosine_ = arrays_.Copy(cosine);
    sine_ = arrays_.Copy(sine);
  }

  Bits Run() {
    const Bf16* const hidden = Forward();
    const Bf16* const dlogits = Loss(hidden);
    Backward(dlogits);
    Update();
    return arrays_.Results();
  }

 private:
  Layer MakeLayer(const std::string& name, const std::vector<int64_t>& rows, int64_t columns) {
    Layer layer;
    layer.name = name;
    layer.leaves = contract::PlanColumns(columns);
    layer.weight.parts = static_cast<int>(rows.size());
    layer.weight.columns = columns;
    for (size_t i = 0; i < rows.size(); ++i) {
      layer.weight.rows[i] = rows[i];
      layer.weight.data[i] = arrays_.Normal(rows[i] * columns, 0.0625f);
    }
    return layer;
  }
  StackedLinearArgs Linear(const Layer& layer, const Bf16* x, int64_t rows) {
    StackedLinearArgs args;
    args.x = x;
    args.ldx = layer.weight.columns;
    args.m = rows;
    args.weight = layer.weight;
    args.leaves = layer.leaves;
    args.sum = layer.sum;
    return args;
  }
  Bf16* Output(const Layer& layer, const Bf16* x, const Bf16* residual, const float* bias) {
    StackedLinearArgs args = Linear(layer, x, kStepRows);
    args.residual = residual;
    args.bias = bias;
    args.bf16_out = arrays_.Result<Bf16>(layer.name, kStepRows * layer.weight.n());
    ExpectOk(ops_.Run(args));
    return args.bf16_out;
  }
  Bf16* Norm(const std::string& name, Bf16* x, const Bf16* weight) {
    Bf16* const out = arrays_.Result<Bf16>(name, kStepRows * kHidden);
    ExpectOk(ops_.Run(RmsNormArgs{.residual = x,
                                  .weight = weight,
                                  .out = out,
                                  .rows = kStepRows,
                                  .hidden = kHidden,
                                  .eps = kEps}));
    return out;
  }

  // Returns what lm_head reads.
  const Bf16* Forward() {
    for (Bf16*& norm : norms_) norm = arrays_.Normal(kHidden, 1.0f);
    head_norm_ = arrays_.Normal(kHeadDim, 1.0f);
    qkv_layer_ = MakeLayer("qkv", {kQ, kKv, kKv}, kHidden);
    o_layer_ = MakeLayer("o", {kHidden}, kQ);
    o_layer_.leaves = contract::PlanKvHeads(kKvHeads, kQ / kKvHeads);
    gate_up_layer_ = MakeLayer("gate_up", {kMiddle, kMiddle}, kHidden);
    down_layer_ = MakeLayer("down", {kHidden}, kMiddle);
    o_layer_.sum = down_layer_.sum = contract::LeafSum::kTree;
    lm_head_ = MakeLayer("lm_head", {kVocab}, kHidden);

    embedded_ = arrays_.Result<Bf16>("embedding", kStepRows * kHidden);
    ExpectOk(ops_.Run(EmbeddingArgs{ids_, kStepRows, arrays_.Normal(kVocab * kHidden, 1.0f),
                                    kHidden, embedded_}));
    norm1_ = Norm("norm1", embedded_, norms_[0]);
    Attend(Output(qkv_layer_, norm1_, nullptr, arrays_.NormalFloats(kQ + 2 * kKv)));
    after_attention_ = Output(o_layer_, attention_.out, embedded_, nullptr);
    norm2_ = Norm("norm2", after_attention_, norms_[1]);
    gate_up_ = Output(gate_up_layer_, norm2_, nullptr, nullptr);
    middle_ = arrays_.Result<Bf16>("swiglu", kStepRows * kMiddle);
    ExpectOk(ops_.Run(SwiGluArgs{gate_up_, middle_, kStepRows, kMiddle}));
    after_mlp_ = Output(down_layer_, middle_, after_attention_, nullptr);
    return Norm("norm3", after_mlp_, norms_[2]);
  }

  void Attend(const Bf16* qkv) {
    heads_ = {.qkv = qkv,
              .rows = kStepRows,
              .positions = positions_,
              .heads = kHeads,
              .kv_heads = kKvHeads,
              .head_dim = kHeadDim,
              .q_norm = head_norm_,
              .k_norm = head_norm_,
              .eps = kEps,
              .cosine = cosine_,
              .sine = sine_,
              .q = arrays_.Result<Bf16>("q", kStepRows * kQ),
              .k = arrays_.Result<Bf16>("k", kStepRows * kKv),
              .v = arrays_.Result<Bf16>("v", kStepRows * kKv)};
    ExpectOk(ops_.Run(heads_));
    attention_ = {
        .q = heads_.q,
        .k = heads_.k,
        .v = heads_.v,
        .rows = kStepRows,
        .heads = kHeads,
        .kv_heads = kKvHeads,
        .head_dim = kHeadDim,
        .sequences = {kBounds, arrays_.Copy<int32_t>({std::begin(kBounds), std::end(kBounds)})},
        .scale = contract::AttentionScale(kHeadDim),
        .out = arrays_.Result<Bf16>("attention", kStepRows * kQ),
        .log_sums = arrays_.Result<float>("log-sums", kHeads * kStepRows)};
    ExpectOk(ops_.Run(attention_));
  }

  // Of the first kTokens rows. Returns the gradient of their logits.
  const Bf16* Loss(const Bf16* hidden) {
    hidden_ = hidden;
    StackedLinearArgs lm_head = Linear(lm_head_, hidden, kTokens);
    lm_head.fp32_out = arrays_.Result<float>("logits", kTokens * kVocab);
    ExpectOk(ops_.Run(lm_head));
    std::vector<int32_t> targets(kTokens);
    std::vector<int32_t> top_k(kTokens);
    for (size_t t = 0; t < kTokens; ++t) {
      targets[t] = ids_[t + 1];
      top_k[t] = t % 3 == 0 ? 246 : 0;
    }
    const TrainingSampling sampling = {
        .temperature = arrays_.Copy(std::vector<float>(kTokens, 0.7f)),
        .top_k = arrays_.Copy(top_k)};
    TrainingLogProbsArgs forward;
    forward.logits = lm_head.fp32_out;
    forward.rows = kTokens;
    forward.vocab = kVocab;
    forward.targets = arrays_.Copy(targets);
    forward.sampling = sampling;
    forward.logprobs = arrays_.Result<float>("logprobs", kTokens);
    forward.entropies = arrays_.Result<float>("entropies", kTokens);
    forward.state = arrays_.Zeros<LogProbRow>(kTokens);
    ExpectOk(ops_.Run(forward));
    float* const values = arrays_.Result<float>("losses", kTokens);
    float* const gradients = arrays_.Result<float>("dlogprobs", kTokens);
    ExpectOk(ops_.Run(
        PolicyLossArgs{.tokens = kTokens,
                       .logprobs = forward.logprobs,
                       .advantages = arrays_.NormalFloats(kTokens),
                       .weights = arrays_.Copy(std::vector<float>(kTokens, 1.0f / kTokens)),
                       .old_logprobs = arrays_.Copy(std::vector<float>(kTokens, -8.0f)),
                       .reference_logprobs = arrays_.Copy(std::vector<float>(kTokens, -7.5f)),
                       .kl = 0.125f,
                       .values = values,
                       .gradients = gradients}));
    ExpectOk(ops_.Run(TreeSumArgs{values, kTokens, arrays_.Result<float>("loss", 1)}));
    Bf16* const dlogits = arrays_.Result<Bf16>("dlogits", kTokens * kVocab);
    ExpectOk(ops_.Run(LogProbGradientArgs{
        forward.logits, kTokens, kVocab, forward.targets, sampling, forward.state, gradients,
        arrays_.Copy(std::vector<float>(kTokens, -0.01f)), dlogits}));
    return dlogits;
  }

  // The packs' bounds among the first `rows` rows.
  std::vector<int64_t> PacksOf(int64_t rows) const {
    std::vector<int64_t> bounds = packs_;
    for (int64_t& bound : bounds) bound = std::min(bound, rows);
    return bounds;
  }

  // Both gradients of a layer on `rows` rows; returns that of its input, of kStepRows rows.
  Bf16* LayerGradient(const Layer& layer, const Bf16* dy, const Bf16* x, int64_t rows) {
    const StackedWeight& weight = layer.weight;
    InputGradientArgs input;
    input.dy = dy;
    input.lddy = weight.n();
    input.m = rows;
    input.weight = weight;
    input.dx = arrays_.Result<Bf16>(layer.name + ".dx", kStepRows * weight.columns);
    ExpectOk(ops_.Run(input));
    const std::vector<int64_t> packs = PacksOf(rows);
    WeightGradientArgs of_weight;
    of_weight.dy = dy;
    of_weight.lddy = weight.n();
    of_weight.x = x;
    of_weight.ldx = weight.columns;
    of_weight.packs = packs;
    of_weight.parts = weight.parts;
    of_weight.columns = weight.columns;
    for (int i = 0; i < weight.parts; ++i) {
      of_weight.part_rows[i] = weight.rows[i];
      of_weight.dw[i] = arrays_.Result<float>(absl::StrCat(layer.name, ".dw.", i),
                                              weight.rows[i] * weight.columns);
    }
    ExpectOk(ops_.Run(of_weight));
    if (layer.name == "o") o_gradient_ = of_weight.dw[0];
    return input.dx;
  }
  Bf16* NormGradient(const std::string& name, const Bf16* x, const Bf16* weight, const Bf16* dy) {
    Bf16* const dx = arrays_.Result<Bf16>(name + ".dx", kStepRows * kHidden);
    ExpectOk(ops_.Run(RmsNormGradientArgs{x, weight, dy, kHidden, kEps, packs_, dx,
                                          arrays_.Result<float>(name + ".dw", kHidden)}));
    return dx;
  }
  // The gradient of a value that the residual and a norm read; the host adds them.
  const Bf16* Sum(const Bf16* a, const Bf16* b) {
    arrays_.Wait();
    Bf16* const sum = arrays_.Zeros<Bf16>(kStepRows * kHidden);
    for (int64_t i = 0; i < kStepRows * kHidden; ++i) {
      sum[i] = contract::FloatToBf16(
          contract::Add(contract::Bf16ToFloat(a[i]), contract::Bf16ToFloat(b[i])));
    }
    return sum;
  }

  void Backward(const Bf16* dlogits) {
    const Bf16* const dhidden = LayerGradient(lm_head_, dlogits, hidden_, kTokens);
    const Bf16* const dmlp = NormGradient("norm3", after_mlp_, norms_[2], dhidden);
    const Bf16* const dmiddle = LayerGradient(down_layer_, dmlp, middle_, kStepRows);
    Bf16* const dgate_up = arrays_.Result<Bf16>("dgate_up", 2 * kStepRows * kMiddle);
    ExpectOk(ops_.Run(SwiGluGradientArgs{gate_up_, dmiddle, kStepRows, kMiddle, dgate_up}));
    const Bf16* const dnorm2 = LayerGradient(gate_up_layer_, dgate_up, norm2_, kStepRows);
    const Bf16* const dattention =
        Sum(dmlp, NormGradient("norm2", after_attention_, norms_[1], dnorm2));
    const Bf16* const dqkv =
        AttentionGradient(LayerGradient(o_layer_, dattention, attention_.out, kStepRows));
    constexpr int64_t kWidth = kQ + 2 * kKv;
    ExpectOk(ops_.Run(
        ColumnSumsArgs{dqkv, kWidth, kWidth, packs_, arrays_.Result<float>("qkv.dbias", kWidth)}));
    const Bf16* const dnorm1 = LayerGradient(qkv_layer_, dqkv, norm1_, kStepRows);
    TableGradient(Sum(dattention, NormGradient("norm1", embedded_, norms_[0], dnorm1)));
  }

  const Bf16* AttentionGradient(const Bf16* dout) {
    Bf16* const dq = arrays_.Result<Bf16>("dq", kStepRows * kQ);
    Bf16* const dk = arrays_.Result<Bf16>("dk", kStepRows * kKv);
    Bf16* const dv = arrays_.Result<Bf16>("dv", kStepRows * kKv);
    ExpectOk(ops_.Run(AttentionGradientArgs{attention_, dout, dq, dk, dv}));
    Bf16* const dqkv = arrays_.Result<Bf16>("dqkv", kStepRows * (kQ + 2 * kKv));
    ExpectOk(ops_.Run(QkvGradientArgs{heads_, dq, dk, dv, packs_, dqkv,
                                      arrays_.Result<float>("q_norm.dw", kHeadDim),
                                      arrays_.Result<float>("k_norm.dw", kHeadDim)}));
    return dqkv;
  }

  void TableGradient(const Bf16* dy) {
    std::vector<int32_t> ids;
    std::vector<int32_t> starts = {0};
    std::vector<int32_t> rows;
    for (int32_t id = 0; id < kVocab; ++id) {
      for (int32_t r = 0; r < kStepRows; ++r) {
        if (ids_[r] == id) rows.push_back(r);
      }
      if (static_cast<int32_t>(rows.size()) == starts.back()) continue;
      ids.push_back(id);
      starts.push_back(static_cast<int32_t>(rows.size()));
    }
    EmbeddingGradientArgs args;
    args.dy = dy;
    args.hidden = kHidden;
    args.table = {arrays_.Copy(ids), arrays_.Copy(starts), arrays_.Copy(rows),
                  static_cast<int64_t>(ids.size())};
    args.packs = packs_;
    args.dtable = arrays_.Result<float>("table.dw", kVocab * kHidden);
    ExpectOk(ops_.Run(args));
  }

  // Of the layer o.
  void Update() {
    double* const rows = arrays_.Result<double>("square sums", kHidden);
    ExpectOk(ops_.Run(SquareSumsArgs{o_gradient_, kHidden, kQ, rows}));
    ExpectOk(ops_.Run(TreeSum64Args{rows, kHidden, arrays_.Result<double>("square sum", 1)}));
    ExpectOk(ops_.Run(AdamWArgs{.count = kHidden * kQ,
                                .parameter = arrays_.Result<float>("o.parameter", kHidden * kQ),
                                .m = arrays_.Result<float>("o.m", kHidden * kQ),
                                .v = arrays_.Result<float>("o.v", kHidden * kQ),
                                .gradient = o_gradient_,
                                .working = arrays_.Result<Bf16>("o.working", kHidden * kQ),
                                .step = {.beta1 = 0.9f,
                                         .one_minus_beta1 = 0.1f,
                                         .beta2 = 0.95f,
                                         .one_minus_beta2 = 0.05f,
                                         .rate = 1e-3f,
                                         .root_scale = 4.0f,
                                         .eps = 1e-8f,
                                         .clip = 0.75f}}));
  }

  OpTable& ops_;
  const std::vector<int64_t> packs_;
  Arrays arrays_;
  const int32_t* ids_ = nullptr;
  const int32_t* positions_ = nullptr;
  const float* cosine_ = nullptr;
  const float* sine_ = nullptr;
  Bf16* norms_[3] = {};
  const Bf16* head_norm_ = nullptr;
  Layer qkv_layer_, o_layer_, gate_up_layer_, down_layer_, lm_head_;
  // What the backward pass reads of the forward pass.
  Bf16* embedded_ = nullptr;
  const Bf16* norm1_ = nullptr;
  TrainingQkvArgs heads_;
  TrainingAttentionArgs attention_;
  Bf16* after_attention_ = nullptr;
  const Bf16* norm2_ = nullptr;
  const Bf16* gate_up_ = nullptr;
  Bf16* middle_ = nullptr;
  Bf16* after_mlp_ = nullptr;
  const Bf16* hidden_ = nullptr;
  const float* o_gradient_ = nullptr;
};

}  // namespace

Bits RunTrainingStep(OpTable& ops, const std::vector<int64_t>& packs, const StepMemory& memory) {
  return Step(ops, packs, memory).Run();
}

}  // namespace isobit::testing_support
