// The rotary fields in the forms of transformers 4 and 5. See rope_parser.h.
#include "common/checkpoint/rope_parser.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/strict_json.h"

namespace isobit {
namespace {

using nlohmann::json;

void ParseLlama3(FieldReader& reader, const ModelConfig& config, RopeScaling& scaling) {
  scaling.type = RopeType::kLlama3;
  scaling.factor = reader.Double("factor");
  scaling.low_freq_factor = reader.Double("low_freq_factor");
  scaling.high_freq_factor = reader.Double("high_freq_factor");
  scaling.original_max_position_embeddings =
      reader.IntOr("original_max_position_embeddings", config.max_position_embeddings);
}

// A beta of null or 0 means its default, as in transformers.
double BetaOr(FieldReader& reader, const char* name, double fallback) {
  const double beta = reader.DoubleOr(name, 0);
  return beta == 0 ? fallback : beta;
}

// max_position_embeddings may be the context before the stretch or the one after it; a config made
// by Qwen's instructions states the one before. Afterwards config has the one after.
void ParseYarn(FieldReader& reader, ModelConfig& config) {
  RopeScaling& scaling = config.rope_scaling;
  scaling.type = RopeType::kYarn;
  const int original =
      reader.IntOr("original_max_position_embeddings", config.max_position_embeddings);
  scaling.original_max_position_embeddings = original;
  if (!reader.Has("factor")) reader.Double("factor");  // missing
  // DeepSeek's configs have a null factor, which means this quotient.
  const double implied = static_cast<double>(config.max_position_embeddings) / original;
  scaling.factor = reader.DoubleOr("factor", implied);
  scaling.beta_fast = BetaOr(reader, "beta_fast", 32);
  scaling.beta_slow = BetaOr(reader, "beta_slow", 1);
  scaling.truncate = reader.BoolOr("truncate", !reader.Has("truncate"));  // null: false
  const bool states_attention = reader.Take("attention_factor") != nullptr;
  scaling.attention_factor = reader.DoubleOr("attention_factor", 0);
  if (states_attention && scaling.attention_factor == 0) {
    reader.Fail("rope_scaling.attention_factor is 0, expected a number above 0, or null");
  }
  const double mscale = reader.DoubleOr("mscale", 0);
  const double mscale_all_dim = reader.DoubleOr("mscale_all_dim", 0);
  if (!states_attention && mscale != 0 && mscale_all_dim != 0) {
    scaling.mscale = mscale;
    scaling.mscale_all_dim = mscale_all_dim;
  }
  const double reach = original * scaling.factor;
  if (reach > config.max_position_embeddings && reach <= kMaxPositions) {
    config.max_position_embeddings = static_cast<int>(reach);
  }
}

// Reads the contents of rope_scaling (transformers 4) or of rope_parameters (transformers 5, with
// rope_theta inside).
absl::Status ParseRopeObject(const json& object, const char* name, bool has_theta,
                             const LoadPolicy& policy, ModelConfig& config) {
  if (!object.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " must be an object"));
  }
  FieldReader reader(object, absl::StrCat(name, "."), policy.ignored_fields);
  const std::string old_type = reader.StringOr("type", "default");
  const std::string type = reader.StringOr("rope_type", old_type);
  reader.RequireIfPresent("type", {type});
  reader.RequireIfPresent("partial_rotary_factor", {1.0});
  const double theta = reader.DoubleOr("rope_theta", config.rope_theta);
  if (has_theta && theta != config.rope_theta) {
    reader.Fail(
        absl::StrCat(name, ".rope_theta is ", theta, ", but rope_theta is ", config.rope_theta));
  }
  config.rope_theta = theta;
  if (type == "linear") {
    config.rope_scaling.type = RopeType::kLinear;
    config.rope_scaling.factor = reader.Double("factor");
  } else if (type == "llama3") {
    ParseLlama3(reader, config, config.rope_scaling);
  } else if (type == "yarn") {
    ParseYarn(reader, config);
  } else if (type != "default") {
    reader.Fail(absl::StrCat(name, ".rope_type is ", Quoted(type),
                             ", supported: default, linear, llama3, yarn"));
  }
  return reader.Finish(config.ignored_fields);
}

}  // namespace

absl::Status ParseRope(FieldReader& reader, const LoadPolicy& policy, ModelConfig& config) {
  const bool has_theta = reader.Take("rope_theta") != nullptr;
  config.rope_theta = reader.DoubleOr("rope_theta", config.rope_theta);
  const json* scaling = reader.Take("rope_scaling");
  const json* parameters = reader.Take("rope_parameters");
  ISOBIT_RETURN_IF_ERROR(reader.status());
  if (scaling != nullptr && parameters != nullptr) {
    return absl::InvalidArgumentError("rope_scaling and rope_parameters are both given");
  }
  if (scaling != nullptr) {
    return ParseRopeObject(*scaling, "rope_scaling", has_theta, policy, config);
  }
  if (parameters != nullptr) {
    return ParseRopeObject(*parameters, "rope_parameters", has_theta, policy, config);
  }
  return absl::OkStatus();
}

}  // namespace isobit
