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

absl::Status HostOps::CopyPages(const CopyPagesArgs& args) {
  for (const PageCopy& copy : args.copies) {
    for (int64_t plane = 0; plane < args.num_planes; ++plane) {
      Bf16* const pages = args.planes + plane * args.plane_stride;
      std::copy_n(pages + copy.from * args.page_elements, args.page_elements,
                  pages + copy.to * args.page_elements);
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit
