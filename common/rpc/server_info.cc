// Fills ServerInfo.
#include "common/rpc/server_info.h"

#include "absl/strings/str_cat.h"
#include "common/checkpoint/tensor_plan.h"

namespace isobit {
namespace {

v1::NumericsMode ToProto(NumericsMode mode) {
  switch (mode) {
    case NumericsMode::kTree:
      return v1::NUMERICS_MODE_TREE;
    case NumericsMode::kBatchInvariant:
      return v1::NUMERICS_MODE_BATCH_INVARIANT;
    case NumericsMode::kVanilla:
      return v1::NUMERICS_MODE_VANILLA;
  }
  return v1::NUMERICS_MODE_UNSPECIFIED;
}

}  // namespace

v1::WeightVersion WeightVersionToProto(const WeightVersion& version) {
  v1::WeightVersion proto;
  proto.set_id(version.id);
  proto.set_digest(version.digest);
  return proto;
}

v1::Fingerprint FingerprintToProto(const ModelConfig& config, const std::string& hex,
                                   uint32_t contract_version) {
  v1::Fingerprint fingerprint;
  fingerprint.set_hex(hex);
  fingerprint.set_contract_version(contract_version);
  fingerprint.set_settings(config.Settings());
  return fingerprint;
}

v1::ServerInfo DescribeServer(const TensorPlan& plan, const ServerIdentity& identity) {
  const ModelConfig& config = plan.config;
  v1::ServerInfo server;
  server.set_version(ISOBIT_VERSION);
  server.set_numerics_mode(ToProto(identity.mode));
  *server.mutable_fingerprint() =
      FingerprintToProto(config, identity.fingerprint, identity.contract_version);
  server.set_instruction_set(identity.instruction_set);
  server.set_max_logprobs(identity.max_logprobs);
  for (const std::string& field : config.ignored_fields) {
    server.add_not_applied(absl::StrCat("config.json: ", field));
  }
  for (const std::string& field : config.generation_fields) server.add_not_applied(field);

  v1::ModelSummary& model = *server.mutable_model();
  model.set_architecture(ArchitectureName(config.architecture));
  model.set_num_layers(static_cast<uint32_t>(config.num_layers));
  model.set_hidden_size(static_cast<uint32_t>(config.hidden_size));
  model.set_intermediate_size(static_cast<uint32_t>(config.intermediate_size));
  model.set_num_attention_heads(static_cast<uint32_t>(config.num_heads));
  model.set_num_key_value_heads(static_cast<uint32_t>(config.num_kv_heads));
  model.set_head_dim(static_cast<uint32_t>(config.head_dim));
  model.set_vocab_size(static_cast<uint32_t>(config.vocab_size));
  model.set_context_length(static_cast<uint32_t>(identity.context_length));
  model.set_num_parameters(NumParameters(plan));
  return server;
}

}  // namespace isobit
