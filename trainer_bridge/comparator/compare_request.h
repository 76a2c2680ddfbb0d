// Reads and checks a Compare request: pure functions of the request.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_REQUEST_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_REQUEST_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/access/quota.h"
#include "isobit/v1/comparator.pb.h"

namespace isobit {

// The number of sequences for each prompt of `request`.
uint32_t SamplesPerPrompt(const v1::CompareRequest& request);

// The number of prompts that `request` wants in flight at the same time.
uint32_t Concurrency(const v1::CompareRequest& request);

// INVALID_ARGUMENT naming field, value and bound: there are no prompts; a prompt_id exceeds 256
// bytes; n is 0; there are too many sequences, as outcomes are kept until the summary; or
// max_concurrency is not in [1, 256]. The rollout checks token ids and other sampling parameters.
absl::Status ValidateCompareRequest(const v1::CompareRequest& request);

// What `request`, valid or not, takes of a quota: the tokens that it brings, and those that it may
// have generated at the same time.
QuotaAmounts AmountsOf(const v1::CompareRequest& request);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_REQUEST_H_
