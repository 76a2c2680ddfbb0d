// What the backends that compute in host memory share: memory is the host's, steps need no staging,
// and the fused SwiGLU is the two ops one after the other.
#ifndef ISOBIT_KERNELS_HOST_OPS_H_
#define ISOBIT_KERNELS_HOST_OPS_H_

#include <memory>
#include <vector>

#include "kernels/ops.h"

namespace isobit {

class HostOps : public Ops {
 public:
  absl::StatusOr<Memory> Allocate(size_t bytes) override;
  absl::StatusOr<std::shared_ptr<const std::byte>> Share(std::shared_ptr<const std::byte> host,
                                                         size_t bytes) override;
  absl::StatusOr<Memory> AllocateBeside(size_t bytes) override { return Allocate(bytes); }
  absl::Status Upload(void* to, const void* from, size_t bytes) override;
  absl::Status Copy(void* to, const void* from, size_t bytes) override;
  absl::Status Synchronize() override;
  absl::StatusOr<StagedStep> Stage(absl::Span<const int32_t> ids,
                                   absl::Span<const SequenceRows> sequences,
                                   int32_t page_size) override;
  absl::Status Linear(const LinearArgs& args) final;

 protected:
  // Linear with bf16_out or fp32_out.
  virtual absl::Status Product(const LinearArgs& args) = 0;

 private:
  std::vector<Bf16> gate_up_;  // [m, n] of a gated Linear
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_HOST_OPS_H_
