// Forward and logits of one sequence, with the probe set meanwhile.
#include "kernels/model/probed_pass.h"

#include <cstdint>

#include "common/base/status_macros.h"

namespace isobit {

absl::Status RunProbedPass(Transformer& transformer, const ProbePass& pass, WeightSource& weights,
                           const ProbeMemory& memory, ForwardProbe& probe) {
  const Batch batch = {.ids = pass.ids, .sequences = {pass.sequence}};
  transformer.SetProbe(&probe);
  const absl::Status done = transformer.Forward(batch, weights, memory.cache, memory.hidden);
  transformer.SetProbe(nullptr);
  ISOBIT_RETURN_IF_ERROR(done);
  const auto last = static_cast<int64_t>(pass.ids.size()) - 1;
  ISOBIT_RETURN_IF_ERROR(
      transformer.Logits(memory.hidden + last * memory.layout.config().hidden_size, 1, weights,
                         memory.logits, memory.layout.shape().vocab.size()));
  return probe.SeeLogits(memory.logits, last);
}

}  // namespace isobit
