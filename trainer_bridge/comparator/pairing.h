// Decides whether two sides may be compared. If not, the error names both sides.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAIRING_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAIRING_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "isobit/v1/comparator.pb.h"

namespace isobit {

// The arithmetic and the weights that `message` states, in its fields fingerprint and
// weight_version.
template <typename Message>
v1::SideIdentity IdentityOf(const Message& message) {
  v1::SideIdentity identity;
  *identity.mutable_fingerprint() = message.fingerprint();
  *identity.mutable_weight_version() = message.weight_version();
  return identity;
}

// FAILED_PRECONDITION: a fingerprint is missing; the fingerprints differ; both sides state the
// model's settings and these differ; or, unless `allow_weight_mismatch`, the weights differ in
// version id or digest. (Services state settings; a recording client need not.)
absl::Status CheckSides(const v1::SideIdentity& rollout, const v1::SideIdentity& scorer,
                        bool allow_weight_mismatch);

// INVALID_ARGUMENT: a side's arrays have different lengths, or the sides' token ids differ.
// FAILED_PRECONDITION, unless `allow_weight_mismatch`: a token's weight versions differ.
absl::Status CheckTokens(const v1::TokenLogprobs& rollout, const v1::TokenLogprobs& scorer,
                         bool allow_weight_mismatch);

// The number of tokens without a logprob on a side. 0 if CheckTokens accepts the sides.
uint64_t MissingTokens(const v1::TokenLogprobs& rollout, const v1::TokenLogprobs& scorer);

// INVALID_ARGUMENT: `id`, the value of `field`, exceeds 256 bytes. It is bounded because the
// history keeps ids after their request has ended.
absl::Status CheckId(const std::string& field, const std::string& id);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAIRING_H_
