// The probes of both sides, the first site that differs, and the cause.
#include "trainer_bridge/comparator/localise.h"

#include <algorithm>
#include <bit>
#include <future>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/base/status_macros.h"
#include "proto/isobit/status_convert.h"
#include "trainer_bridge/comparator/gap.h"
#include "trainer_bridge/comparator/pairing.h"

namespace isobit {
namespace {

using Digests = std::map<std::pair<uint32_t, v1::ProbeOp>, uint64_t>;

// What an op reads besides the results before it: names of parameters in a checkpoint, L the layer.
std::vector<std::string> WeightsOf(const v1::ProbeSite& site) {
  static const auto* const weights = new std::map<v1::ProbeOp, std::vector<std::string>>{
      {v1::PROBE_OP_EMBEDDING, {"model.embed_tokens.weight"}},
      {v1::PROBE_OP_INPUT_NORM, {"model.layers.L.input_layernorm.weight"}},
      {v1::PROBE_OP_QKV,
       {"model.layers.L.self_attn.q_proj.weight", "model.layers.L.self_attn.q_proj.bias",
        "model.layers.L.self_attn.k_proj.weight", "model.layers.L.self_attn.k_proj.bias",
        "model.layers.L.self_attn.v_proj.weight", "model.layers.L.self_attn.v_proj.bias"}},
      {v1::PROBE_OP_Q, {"model.layers.L.self_attn.q_norm.weight"}},
      {v1::PROBE_OP_K, {"model.layers.L.self_attn.k_norm.weight"}},
      {v1::PROBE_OP_ATTENTION_SUM,
       {"model.layers.L.self_attn.o_proj.weight", "model.layers.L.self_attn.o_proj.bias"}},
      {v1::PROBE_OP_POST_NORM, {"model.layers.L.post_attention_layernorm.weight"}},
      {v1::PROBE_OP_GATE,
       {"model.layers.L.mlp.gate_proj.weight", "model.layers.L.mlp.gate_proj.bias"}},
      {v1::PROBE_OP_UP, {"model.layers.L.mlp.up_proj.weight", "model.layers.L.mlp.up_proj.bias"}},
      {v1::PROBE_OP_MLP_SUM,
       {"model.layers.L.mlp.down_proj.weight", "model.layers.L.mlp.down_proj.bias"}},
      {v1::PROBE_OP_FINAL_NORM, {"model.norm.weight"}},
      {v1::PROBE_OP_LOGITS, {"lm_head.weight", "model.embed_tokens.weight"}},
  };
  const auto found = weights->find(site.op());
  std::vector<std::string> names;
  if (found == weights->end()) return names;
  for (const std::string& name : found->second) {
    names.push_back(absl::StrReplaceAll(name, {{".L.", absl::StrCat(".", site.layer(), ".")}}));
  }
  return names;
}

struct BothProbes {
  v1::ProbeResponse rollout, scorer;
};

class Localisation {
 public:
  Localisation(const Upstreams& upstreams, const v1::LocaliseRequest& request,
               const grpc::CallbackServerContext& call)
      : upstreams_(upstreams), request_(request), call_(call) {
    *probe_.mutable_token_ids() = request.prompt_token_ids();
    probe_.mutable_token_ids()->MergeFrom(request.completion_token_ids());
  }

  absl::StatusOr<v1::LocaliseResponse> Run() {
    probe_.set_tensor_digests(true);
    ISOBIT_ASSIGN_OR_RETURN(const BothProbes probes, Probe());
    probe_.set_tensor_digests(false);
    *response_.mutable_rollout() = IdentityOf(probes.rollout);
    *response_.mutable_scorer() = IdentityOf(probes.scorer);
    Digests of_scorer;
    for (const auto& digest : probes.scorer.digests()) {
      of_scorer[{digest.site().layer(), digest.site().op()}] = digest.digest();
    }
    const v1::ProbeSite* first = nullptr;
    for (const auto& digest : probes.rollout.digests()) {
      const auto other = of_scorer.find({digest.site().layer(), digest.site().op()});
      if (other == of_scorer.end()) return OtherShapes();
      if (other->second != digest.digest() && first == nullptr) first = &digest.site();
    }
    response_.set_num_ops(static_cast<uint32_t>(probes.rollout.digests_size()));
    if (of_scorer.size() != response_.num_ops()) return OtherShapes();
    if (first == nullptr) return OfLogprobs();
    *response_.mutable_site() = *first;
    *probe_.mutable_site() = *first;
    NameCause(probes);
    ISOBIT_RETURN_IF_ERROR(FindElement());
    return response_;
  }

 private:
  std::unique_ptr<grpc::ClientContext> NewContext() const {
    return grpc::ClientContext::FromCallbackServerContext(call_);
  }

  // Both at the same time. ABORTED: they are not as they were.
  absl::StatusOr<BothProbes> Probe() const {
    BothProbes probes;
    std::future<absl::Status> rollout = std::async(std::launch::async, [&] {
      const auto context = NewContext();
      return Annotate(
          FromGrpcStatus(upstreams_.rollout->Probe(context.get(), probe_, &probes.rollout)),
          "rollout Probe");
    });
    const auto context = NewContext();
    const absl::Status scorer =
        Annotate(FromGrpcStatus(upstreams_.scorer->Probe(context.get(), probe_, &probes.scorer)),
                 "scorer Probe");
    ISOBIT_RETURN_IF_ERROR(rollout.get());
    ISOBIT_RETURN_IF_ERROR(scorer);
    ISOBIT_RETURN_IF_ERROR(CheckUnchanged("rollout", response_.rollout(), probes.rollout));
    ISOBIT_RETURN_IF_ERROR(CheckUnchanged("scorer", response_.scorer(), probes.scorer));
    return probes;
  }

  template <typename Answer>
  static absl::Status CheckUnchanged(const char* side, const v1::SideIdentity& before,
                                     const Answer& answer) {
    const bool is_first = before.fingerprint().hex().empty();
    if (is_first || (before.fingerprint().hex() == answer.fingerprint().hex() &&
                     before.weight_version().id() == answer.weight_version().id())) {
      return absl::OkStatus();
    }
    return absl::AbortedError(absl::StrCat(side, ": its weights were version ",
                                           before.weight_version().id(), " and became version ",
                                           answer.weight_version().id(), " meanwhile"));
  }

  v1::LocaliseResponse OtherShapes() {
    response_.set_cause(v1::DIFFERENCE_CAUSE_WEIGHTS);
    response_.set_explanation("the two sides serve models of different shapes");
    return response_;
  }

  // The tensors that differ among those that the op reads.
  std::vector<std::string> DifferentTensors(const BothProbes& probes) const {
    std::vector<std::string> names = WeightsOf(response_.site());
    const auto& rollout = probes.rollout.tensors();
    const auto& scorer = probes.scorer.tensors();
    if (rollout.empty() || scorer.empty()) {
      const bool may_differ =
          probes.rollout.weight_version().digest() != probes.scorer.weight_version().digest();
      return may_differ ? names : std::vector<std::string>();
    }
    // The embedding is read in its place if it is missing: a tied head.
    if (rollout.contains("lm_head.weight") && names.front() == "lm_head.weight") names.resize(1);
    std::erase_if(names, [&](const std::string& name) {
      const auto a = rollout.find(name);
      const auto b = scorer.find(name);
      return a == rollout.end() || b == scorer.end() || a->second == b->second;
    });
    return names;
  }

  void NameCause(const BothProbes& probes) {
    const std::vector<std::string> tensors =
        WeightsOf(response_.site()).empty() ? std::vector<std::string>() : DifferentTensors(probes);
    response_.mutable_tensors()->Add(tensors.begin(), tensors.end());
    if (!tensors.empty()) {
      response_.set_cause(v1::DIFFERENCE_CAUSE_WEIGHTS);
      response_.set_explanation(absl::StrCat("its inputs are equal, and the sides have different ",
                                             absl::StrJoin(tensors, ", ")));
      return;
    }
    response_.set_cause(v1::DIFFERENCE_CAUSE_ARITHMETIC);
    const absl::Status comparable = CheckSides(response_.rollout(), response_.scorer(),
                                               /*allow_weight_mismatch=*/true);
    response_.set_explanation(
        comparable.ok() ? "its inputs and the tensors that it reads are equal: a kernel is at "
                          "fault, or memory has changed since the weights were loaded"
                        : absl::StrCat("its inputs and the tensors that it reads are equal; ",
                                       comparable.message()));
  }

  absl::Status FindElement() {
    ISOBIT_ASSIGN_OR_RETURN(const BothProbes rows, Probe());
    const int row = FirstUnequal(rows.rollout.row_digests(), rows.scorer.row_digests());
    if (row < 0) return absl::OkStatus();
    probe_.set_row(static_cast<uint32_t>(row));
    ISOBIT_ASSIGN_OR_RETURN(const BothProbes values, Probe());
    const auto& a = values.rollout.values();
    const auto& b = values.scorer.values();
    const int column = FirstUnequal(a, b);
    if (column < 0) return absl::OkStatus();
    v1::DifferentElement& element = *response_.mutable_element();
    element.set_token(static_cast<uint32_t>(row));
    element.set_column(static_cast<uint32_t>(column));
    element.set_rollout_bits(a[column]);
    element.set_scorer_bits(b[column]);
    element.set_ulp_distance(
        UlpDistance(std::bit_cast<float>(a[column]), std::bit_cast<float>(b[column])));
    uint32_t num_different = 0;
    for (int c = column; c < std::min(a.size(), b.size()); ++c) num_different += a[c] != b[c];
    element.set_num_different(num_different);
    return absl::OkStatus();
  }

  // -1: none.
  template <typename Values>
  static int FirstUnequal(const Values& a, const Values& b) {
    const int count = std::min(a.size(), b.size());
    for (int i = 0; i < count; ++i) {
      if (a[i] != b[i]) return i;
    }
    return -1;
  }

  absl::StatusOr<std::vector<float>> Score(const v1::LocaliseSide& side,
                                           v1::LogprobMode mode) const {
    v1::ScoreRequest request;
    v1::ScoreSequence& sequence = *request.add_sequences();
    *sequence.mutable_prompt_token_ids() = request_.prompt_token_ids();
    *sequence.mutable_completion_token_ids() = request_.completion_token_ids();
    *request.mutable_sampling() = side.sampling();
    request.mutable_sampling()->clear_logprobs();
    request.set_logprob_mode(mode);
    const auto context = NewContext();
    const auto reader = upstreams_.scorer->Score(context.get(), request);
    v1::ScoreResponse scored;
    std::vector<float> logprobs;
    while (reader->Read(&scored)) {
      logprobs.assign(scored.completion().logprobs().begin(), scored.completion().logprobs().end());
      ISOBIT_RETURN_IF_ERROR(CheckUnchanged("scorer", response_.scorer(), scored));
    }
    ISOBIT_RETURN_IF_ERROR(Annotate(FromGrpcStatus(reader->Finish()), "scorer Score"));
    return logprobs;
  }

  absl::StatusOr<v1::LocaliseResponse> OfLogprobs() {
    LogprobEvidence evidence;
    if (!request_.completion_token_ids().empty()) {
      const v1::LocaliseSide& rollout = request_.rollout();
      const v1::LocaliseSide& scorer = request_.has_scorer() ? request_.scorer() : rollout;
      evidence.rollout_said.assign(rollout.logprobs().begin(), rollout.logprobs().end());
      if (request_.has_scorer()) {
        evidence.scorer_said.assign(scorer.logprobs().begin(), scorer.logprobs().end());
      }
      ISOBIT_ASSIGN_OR_RETURN(evidence.rollout_parameters_give,
                              Score(rollout, rollout.logprob_mode()));
      ISOBIT_ASSIGN_OR_RETURN(evidence.scorer_parameters_give,
                              Score(scorer, scorer.logprob_mode()));
      ISOBIT_ASSIGN_OR_RETURN(evidence.raw_gives, Score({}, v1::LOGPROB_MODE_RAW));
    }
    const LogprobVerdict verdict = JudgeLogprobs(evidence);
    response_.set_cause(verdict.cause);
    response_.set_explanation(verdict.explanation);
    if (verdict.position) response_.set_position(*verdict.position);
    return response_;
  }

  const Upstreams& upstreams_;
  const v1::LocaliseRequest& request_;
  const grpc::CallbackServerContext& call_;
  v1::ProbeRequest probe_;
  v1::LocaliseResponse response_;
};

// Of logprobs that are known on both sides.
std::optional<uint32_t> FirstUnequalBits(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) {
      return static_cast<uint32_t>(i);
    }
  }
  return std::nullopt;
}

absl::Status CheckLogprobs(const char* side, const v1::LocaliseSide& of,
                           const v1::LocaliseRequest& request) {
  const int count = of.logprobs_size();
  if (count == 0 || count == request.completion_token_ids_size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(side, ".logprobs: ", count, " entries, expected none or ",
                   request.completion_token_ids_size(), ", as there are completion_token_ids"));
}

}  // namespace

absl::Status ValidateLocaliseRequest(const v1::LocaliseRequest& request) {
  if (request.prompt_token_ids().empty()) {
    return absl::InvalidArgumentError("prompt_token_ids: none, expected at least one");
  }
  ISOBIT_RETURN_IF_ERROR(CheckLogprobs("rollout", request.rollout(), request));
  return CheckLogprobs("scorer", request.scorer(), request);
}

LogprobVerdict JudgeLogprobs(const LogprobEvidence& evidence) {
  const auto& by_rollout = evidence.rollout_parameters_give;
  const auto& by_scorer = evidence.scorer_parameters_give;
  const std::optional<uint32_t> rollout = FirstUnequalBits(evidence.rollout_said, by_rollout);
  const std::optional<uint32_t> scorer = FirstUnequalBits(evidence.scorer_said, by_scorer);
  const std::optional<uint32_t> parameters = FirstUnequalBits(by_rollout, by_scorer);
  const auto is = [](const std::vector<float>& said, const std::vector<float>& given) {
    return !FirstUnequalBits(said, given).has_value();
  };
  if (rollout && is(evidence.rollout_said, by_scorer)) {
    return {v1::DIFFERENCE_CAUSE_SAMPLING_PARAMETERS, rollout,
            "what the rollout said follows from the scorer's parameters, not from its own"};
  }
  if (rollout && is(evidence.rollout_said, evidence.raw_gives)) {
    return {v1::DIFFERENCE_CAUSE_SAMPLING_PARAMETERS, rollout,
            "what the rollout said is the model's own distribution, without its parameters"};
  }
  if (rollout) {
    return {v1::DIFFERENCE_CAUSE_ROLLOUT_STATE, rollout,
            "all ops are equal now, and what the rollout said does not follow from them: its state "
            "was wrong when it sampled, such as a page of the KV cache at or before this token"};
  }
  if (scorer && is(evidence.scorer_said, by_rollout)) {
    return {v1::DIFFERENCE_CAUSE_SAMPLING_PARAMETERS, scorer,
            "what the scorer said follows from the rollout's parameters, not from its own"};
  }
  if (scorer && is(evidence.scorer_said, evidence.raw_gives)) {
    return {v1::DIFFERENCE_CAUSE_SAMPLING_PARAMETERS, scorer,
            "what the scorer said is the model's own distribution, without its parameters"};
  }
  if (scorer) {
    return {v1::DIFFERENCE_CAUSE_INPUT, scorer,
            "what the scorer said is not what it computes for this sequence with these parameters: "
            "it was given another sequence or other parameters"};
  }
  if (parameters) {
    return {v1::DIFFERENCE_CAUSE_SAMPLING_PARAMETERS, parameters,
            "each side computes what it was asked for, and was asked with other parameters"};
  }
  return {.cause = v1::DIFFERENCE_CAUSE_NONE,
          .explanation = "all ops, and all logprobs that are known, have equal bits"};
}

absl::StatusOr<v1::LocaliseResponse> Localise(const Upstreams& upstreams,
                                              const v1::LocaliseRequest& request,
                                              const grpc::CallbackServerContext& call) {
  return Localisation(upstreams, request, call).Run();
}

}  // namespace isobit
