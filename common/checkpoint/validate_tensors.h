// Checks that a checkpoint has the tensors that a model's plan needs.
#ifndef ISOBIT_COMMON_CHECKPOINT_VALIDATE_TENSORS_H_
#define ISOBIT_COMMON_CHECKPOINT_VALIDATE_TENSORS_H_

#include "absl/status/status.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/tensor_source.h"
#include "common/checkpoint/weight_reader.h"

namespace isobit {

// INVALID_ARGUMENT, naming up to five tensors of each kind: tensors are missing, unexpected, or
// have another shape. The plan's tied tensors may be present; CheckTiedTensors checks their bytes.
// Rotary buffers of old checkpoints (IsRotaryBuffer) are ignored.
absl::Status ValidateTensors(const TensorPlan& plan, const TensorSource& source);

// INVALID_ARGUMENT: a tied tensor in the checkpoint, for instance an lm_head, differs from the one
// to which the config ties it.
absl::Status CheckTiedTensors(const TensorPlan& plan, const CheckpointDigests& digests);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_VALIDATE_TENSORS_H_
