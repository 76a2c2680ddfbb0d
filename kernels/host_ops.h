// Common to backends that compute in host memory: memory is the host's, steps need no upload, and a
// fused SwiGLU is computed as two ops.
#ifndef ISOBIT_KERNELS_HOST_OPS_H_
#define ISOBIT_KERNELS_HOST_OPS_H_

#include <vector>

#include "kernels/host_device.h"
#include "kernels/ops.h"

namespace isobit {

class HostOps : public Ops {
 public:
  Device& device() override { return device_; }
  StepTables& tables() override { return tables_; }
  absl::Status Linear(const LinearArgs& args) final;
  absl::Status CopyPages(const CopyPagesArgs& args) final;

 protected:
  // Linear with bf16_out or fp32_out set.
  virtual absl::Status Product(const LinearArgs& args) = 0;

 private:
  HostDevice device_;
  HostStepTables tables_;
  std::vector<Bf16> gate_up_;  // [m, n] of a gated Linear
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_HOST_OPS_H_
