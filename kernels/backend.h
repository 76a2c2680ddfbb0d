// What computes for one tensor-parallel rank: a device, its tables, its weight layout and every op.
// Not here: how an op is computed.
//
// A rank's backend is chosen once: the CPU backend (kernels/cpu), its scalar definition
// (kernels/oracle) or CUDA (kernels/cuda). Every backend gives the same bits in mode kTree.
#ifndef ISOBIT_KERNELS_BACKEND_H_
#define ISOBIT_KERNELS_BACKEND_H_

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "kernels/ops/op_table.h"
#include "kernels/step_tables.h"
#include "kernels/weight_packer.h"

namespace isobit {

// Serves one caller at a time.
class Backend : public OpTable {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  virtual const char* name() const = 0;  // such as "cpu/avx512"
  // The memory to which the ops' arguments point. Ops and the device's copies run in the order in
  // which they are called.
  virtual Device& device() = 0;
  // Makes steps ready for the ops.
  virtual StepTables& tables() = 0;
  // The memory layout in which the ops read weights.
  virtual const WeightPacker& packer() const = 0;
};

// A backend whose memory is the host's: steps need no upload.
class HostBackend : public Backend {
 public:
  Device& device() final { return device_; }
  StepTables& tables() final { return tables_; }

 private:
  HostDevice device_;
  HostStepTables tables_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BACKEND_H_
