// What backends in host memory share: a fused SwiGLU as two ops, copies of pages, and losses with
// their sums (C14), which need no speed.
#ifndef ISOBIT_KERNELS_HOST_KERNELS_H_
#define ISOBIT_KERNELS_HOST_KERNELS_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "common/base/status_macros.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/losses.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/swiglu.h"

namespace isobit {

void CopyHostPages(const CopyPagesArgs& args);

absl::Status RunOnHost(const PolicyLossArgs& a);
absl::Status RunOnHost(const LossFunctionArgs& a);
absl::Status RunOnHost(const TreeSumArgs& a);
absl::Status RunOnHost(const SequenceSumsArgs& a);

// Linear with swiglu_out set: `product` is a Linear with bf16_out, `swiglu` a SwiGlu. buffer: keeps
// its memory for the next call.
template <typename Product, typename SwiGlu>
absl::Status LinearThenSwiGlu(const LinearArgs& args, std::vector<Bf16>& buffer,
                              const Product& product, const SwiGlu& swiglu) {
  const int64_t n = args.weight.shape.n;
  buffer.resize(std::max(buffer.size(), static_cast<size_t>(args.m * n)));
  LinearArgs gate_up = args;
  gate_up.swiglu_out = nullptr;
  gate_up.bf16_out = buffer.data();
  gate_up.ldy = n;
  ISOBIT_RETURN_IF_ERROR(product(gate_up));
  return swiglu(SwiGluArgs{
      .gate_up = buffer.data(), .out = args.swiglu_out, .rows = args.m, .columns = n / 2});
}

}  // namespace isobit

#endif  // ISOBIT_KERNELS_HOST_KERNELS_H_
