// Checks that two sides are comparable.
#include "trainer_bridge/comparator/pairing.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

constexpr size_t kMaxIdBytes = 256;

std::string Describe(const v1::Fingerprint& fingerprint) {
  if (fingerprint.hex().empty()) return "none";
  return absl::StrCat(fingerprint.hex(), " (contract ", fingerprint.contract_version(), ")");
}

std::string Describe(const v1::WeightVersion& version) {
  return absl::StrCat(version.id(), " (digest ",
                      version.digest().empty() ? "none" : version.digest(), ")");
}

absl::Status CheckLengths(const char* side, const v1::TokenLogprobs& tokens) {
  const int expected = tokens.token_ids_size();
  const auto check = [&](const char* field, int actual) {
    if (actual == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(side, ".", field, ": ", actual,
                                                   " entries, expected ", expected,
                                                   " as there are token_ids"));
  };
  ISOBIT_RETURN_IF_ERROR(check("logprobs", tokens.logprobs_size()));
  return check("weight_versions", tokens.weight_versions_size());
}

}  // namespace

absl::Status CheckSides(const v1::SideIdentity& rollout, const v1::SideIdentity& scorer,
                        bool allow_weight_mismatch) {
  const v1::Fingerprint& a = rollout.fingerprint();
  const v1::Fingerprint& b = scorer.fingerprint();
  if (a.hex().empty() || a.hex() != b.hex() || a.contract_version() != b.contract_version()) {
    return absl::FailedPreconditionError(absl::StrCat("fingerprints must be equal: rollout has ",
                                                      Describe(a), ", scorer has ", Describe(b)));
  }
  if (!a.settings().empty() && !b.settings().empty() && a.settings() != b.settings()) {
    return absl::FailedPreconditionError(
        absl::StrCat("settings of the model directories must be equal: rollout has ", a.settings(),
                     ", scorer has ", b.settings()));
  }
  const v1::WeightVersion& v = rollout.weight_version();
  const v1::WeightVersion& w = scorer.weight_version();
  if (!allow_weight_mismatch && (v.id() != w.id() || v.digest() != w.digest())) {
    return absl::FailedPreconditionError(absl::StrCat("weight versions must be equal: rollout has ",
                                                      Describe(v), ", scorer has ", Describe(w)));
  }
  return absl::OkStatus();
}

absl::Status CheckTokens(const v1::TokenLogprobs& rollout, const v1::TokenLogprobs& scorer,
                         bool allow_weight_mismatch) {
  ISOBIT_RETURN_IF_ERROR(CheckLengths("rollout", rollout));
  ISOBIT_RETURN_IF_ERROR(CheckLengths("scorer", scorer));
  if (rollout.token_ids_size() != scorer.token_ids_size()) {
    return absl::InvalidArgumentError(absl::StrCat("token_ids: rollout has ",
                                                   rollout.token_ids_size(), ", scorer has ",
                                                   scorer.token_ids_size()));
  }
  for (int i = 0; i < rollout.token_ids_size(); ++i) {
    if (rollout.token_ids(i) != scorer.token_ids(i)) {
      return absl::InvalidArgumentError(absl::StrCat("token_ids[", i, "]: rollout has ",
                                                     rollout.token_ids(i), ", scorer has ",
                                                     scorer.token_ids(i)));
    }
    if (!allow_weight_mismatch && rollout.weight_versions(i) != scorer.weight_versions(i)) {
      return absl::FailedPreconditionError(
          absl::StrCat("weight_versions[", i, "] must be equal: rollout has ",
                       rollout.weight_versions(i), ", scorer has ", scorer.weight_versions(i)));
    }
  }
  return absl::OkStatus();
}

uint64_t MissingTokens(const v1::TokenLogprobs& rollout, const v1::TokenLogprobs& scorer) {
  const int all = std::max(rollout.token_ids_size(), scorer.token_ids_size());
  const int complete = std::min(rollout.logprobs_size(), scorer.logprobs_size());
  return static_cast<uint64_t>(std::max(0, all - complete));
}

absl::Status CheckId(const std::string& field, const std::string& id) {
  if (id.size() <= kMaxIdBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", id.size(), " bytes, expected at most ", kMaxIdBytes));
}

}  // namespace isobit
