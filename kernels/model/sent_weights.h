// Weights that other processes send to each rank: only what it asks for, in the order of its jobs.
// docs/API.md, "Weights by NCCL", defines the exchange.
#ifndef ISOBIT_KERNELS_MODEL_SENT_WEIGHTS_H_
#define ISOBIT_KERNELS_MODEL_SENT_WEIGHTS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/parallel/weight_senders.h"
#include "kernels/model/pack_from_device.h"

namespace isobit {

// Joins the senders' group. Arriving weights take device memory of the size of the largest block.
// `blocks` says which sender has which block of `tensors`; ValidateBlocks has accepted them. Both,
// and `packer`, outlive the source. Errors: those of WeightSenders::Join; UNIMPLEMENTED: the
// packer's device has no senders.
absl::StatusOr<std::unique_ptr<SliceSource>> ReceiveWeights(const std::vector<Tensor>& tensors,
                                                            const WeightBlocks& blocks,
                                                            const SenderGroup& group,
                                                            DevicePacker& packer);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_SENT_WEIGHTS_H_
