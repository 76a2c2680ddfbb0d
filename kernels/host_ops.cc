// See host_ops.h.
#include "kernels/host_ops.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace isobit {

absl::StatusOr<Memory> HostOps::Allocate(size_t bytes) {
  constexpr size_t kAlignment = 256;
  const size_t rounded = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", rounded, " bytes"));
  }
  return Memory(memory, [](std::byte* p) { std::free(p); });
}

absl::StatusOr<std::shared_ptr<const std::byte>> HostOps::Share(
    std::shared_ptr<const std::byte> host, size_t /*bytes*/) {
  return host;
}

absl::Status HostOps::Upload(void* to, const void* from, size_t bytes) {
  return HostOps::Copy(to, from, bytes);
}

absl::Status HostOps::Copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);  // no bytes may have no address
  return absl::OkStatus();
}

absl::Status HostOps::Synchronize() { return absl::OkStatus(); }

absl::StatusOr<StagedStep> HostOps::Stage(absl::Span<const int32_t> ids,
                                          absl::Span<const SequenceRows> sequences,
                                          int32_t /*page_size*/) {
  return StagedStep{ids.data(), {sequences}};
}

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
