// Shared by all uses of NCCL: its results as statuses, and its environment.
#ifndef ISOBIT_COMMON_PARALLEL_NCCL_STATUS_H_
#define ISOBIT_COMMON_PARALLEL_NCCL_STATUS_H_

#include <nccl.h>

#include "absl/status/status.h"

namespace isobit {

// OK also while a call is in progress. UNAVAILABLE: a peer or the network failed. INTERNAL:
// anything else. comm: its last error is added to the message; may be null.
absl::Status NcclStatus(ncclResult_t result, const char* what, ncclComm_t comm);

// Call it before NCCL's first call, which reads the environment. Keeps what the user has set.
void SetNcclEnvironment();

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_NCCL_STATUS_H_
