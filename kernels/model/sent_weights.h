// Weights that their holders send to each rank: only what it asks for, in the order of its jobs.
// docs/API.md, "Weights by NCCL", says what passes.
#ifndef ISOBIT_KERNELS_MODEL_SENT_WEIGHTS_H_
#define ISOBIT_KERNELS_MODEL_SENT_WEIGHTS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/parallel/weight_senders.h"
#include "kernels/model/pack_from_device.h"

namespace isobit {

// Joins the senders' group. What arrives takes device memory: that of the largest block. `blocks`
// says which sender holds which part of `tensors`, as ValidateBlocks has accepted; both, and
// `packer`, outlive the source. Errors: those of WeightSenders::Join; UNIMPLEMENTED: the packer's
// device has no senders.
absl::StatusOr<std::unique_ptr<SliceSource>> ReceiveWeights(const std::vector<Tensor>& tensors,
                                                            const WeightBlocks& blocks,
                                                            const SenderGroup& group,
                                                            DevicePacker& packer);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_SENT_WEIGHTS_H_
