// Reads and checks a Compare request: pure functions of the request.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_REQUEST_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_REQUEST_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/rpc/quota.h"
#include "isobit/v1/comparator.pb.h"

namespace isobit {

// The sequences that each prompt of `request` becomes.
uint32_t SamplesPerPrompt(const v1::CompareRequest& request);

// The prompts that `request` wants in flight at one time.
uint32_t Concurrency(const v1::CompareRequest& request);

// INVALID_ARGUMENT naming field, value and bound: no prompts; a prompt_id over 256 bytes; n = 0;
// too many sequences, since their outcomes are kept until the summary; max_concurrency outside
// [1, 256]. The rollout checks token ids and the other sampling parameters.
absl::Status ValidateCompareRequest(const v1::CompareRequest& request);

// What `request`, valid or not, counts against a quota: what it brings, and what it may have
// generated at one time.
QuotaAmounts AmountsOf(const v1::CompareRequest& request);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_REQUEST_H_
