// The ops of a pass that a probe observes: an op is computed as always, and then the probe sees its
// results. Blocks know nothing of it.
#ifndef ISOBIT_KERNELS_MODEL_PROBED_OPS_H_
#define ISOBIT_KERNELS_MODEL_PROBED_OPS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/growing_buffer.h"
#include "kernels/model/forward_probe.h"
#include "kernels/model/weights.h"
#include "kernels/ops/op_table.h"

namespace isobit {

class ProbedOps final : public OpTable {
 public:
  // Both outlive the object.
  ProbedOps(const WeightLayout& layout, Backend& ops);

  // Allocates memory for products that a pass of `rows` rows does not store. RESOURCE_EXHAUSTED:
  // there is none.
  absl::Status Reserve(int64_t rows);

  // From now on `probe` sees the ops of block `block`, one of plan().blocks by its number in the
  // layout, whose weights are `bytes`.
  void BeginBlock(int block, const std::byte* bytes, ForwardProbe& probe);

  // What the table calls.
  absl::Status On(const LinearArgs& args);
  absl::Status On(const QkvArgs& args);
  absl::Status On(const AttentionArgs& args);

 private:
  ProbeSite SiteOf(ProbeOp op) const;
  // The columns of this rank's query heads.
  ForwardProbe::Columns Queries() const;

  const WeightLayout& layout_;
  Backend& ops_;
  GrowingBuffer<Bf16> product_;  // of a gated layer, before SwiGLU
  int block_ = 0;
  const std::byte* bytes_ = nullptr;
  ForwardProbe* probe_ = nullptr;
};

template <typename Args>
absl::Status Run(const Args& args, ProbedOps& ops) {
  return ops.On(args);
}

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_PROBED_OPS_H_
