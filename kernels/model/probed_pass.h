// The forward pass that a probe observes, as rollout and scorer run it.
#ifndef ISOBIT_KERNELS_MODEL_PROBED_PASS_H_
#define ISOBIT_KERNELS_MODEL_PROBED_PASS_H_

#include "absl/status/status.h"
#include "kernels/model/forward_probe.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"
#include "kernels/model/weights.h"

namespace isobit {

// The memory of a pass, for a rank's `layout`.
struct ProbeMemory {
  const WeightLayout& layout;
  const KvCache& cache;  // with the pass's pages
  Bf16* hidden;          // [rows of the pass, hidden_size]
  float* logits;         // [this rank's columns]
};

// Computes all layers, then the logits of the last row; `probe` sees every result. Call
// Transformer::PrepareProbe before.
absl::Status RunProbedPass(Transformer& transformer, const ProbePass& pass, WeightSource& weights,
                           const ProbeMemory& memory, ForwardProbe& probe);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_PROBED_PASS_H_
