// See host_ops.h.
#include "kernels/host_ops.h"

#include <algorithm>

#include "common/base/status_macros.h"

namespace isobit {

absl::Status HostOps::Linear(const LinearArgs& args) {
  if (args.swiglu_out == nullptr) return Product(args);
  const int64_t n = args.weight.shape.n;
  gate_up_.resize(std::max(gate_up_.size(), static_cast<size_t>(args.m * n)));
  LinearArgs product = args;
  product.swiglu_out = nullptr;
  product.bf16_out = gate_up_.data();
  product.ldy = n;
  ISOBIT_RETURN_IF_ERROR(Product(product));
  return SwiGlu(
      {.gate_up = gate_up_.data(), .out = args.swiglu_out, .rows = args.m, .columns = n / 2});
}

}  // namespace isobit
