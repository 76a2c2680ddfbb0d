// How many KV pages a rank's GPU has room for, beside weights and activations.
#ifndef ISOBIT_KERNELS_RUNTIME_MEMORY_PLAN_H_
#define ISOBIT_KERNELS_RUNTIME_MEMORY_PLAN_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/model_config.h"
#include "common/config/numerics_mode.h"

namespace isobit {

struct MemoryPlanOptions {
  absl::Span<const int> devices;  // of the ranks, by rank
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;
  int64_t max_sequences = 0;  // of a step
  int64_t max_rows = 0;       // of a step
  bool peer_memory = true;    // as in CudaRankOptions
  double fraction = 0.9;      // of each GPU's free memory that the engine may take, in (0, 1]
};

// The pages that fit on every rank, at most 2^31 - 1. RESOURCE_EXHAUSTED: not one does, with what
// is needed and what is free. Errors of MakeCudaOps.
absl::StatusOr<int32_t> AffordablePages(const ModelConfig& config,
                                        const MemoryPlanOptions& options);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_MEMORY_PLAN_H_
