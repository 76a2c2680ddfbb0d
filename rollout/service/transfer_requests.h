// Reads and checks the calls of a weight transfer: the trainer's group, and which tensors come in
// which broadcast. Not here: the transfer itself (weight_transfer.h).
#ifndef ISOBIT_ROLLOUT_SERVICE_TRANSFER_REQUESTS_H_
#define ISOBIT_ROLLOUT_SERVICE_TRANSFER_REQUESTS_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/safetensors.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/parallel/weight_broadcast.h"
#include "isobit/v1/rollout.pb.h"

namespace isobit {

// How tensors are put into broadcasts.
struct Packing {
  bool packed = false;  // false: one broadcast for each tensor
  // A packed broadcast ends with the tensor that takes it beyond this size.
  uint64_t buffer_bytes = uint64_t{1} << 30;
};

struct TransferGroup {
  std::string store_host;  // the host whose store has the id; empty: `group` has the id
  int store_port = 0;
  BroadcastGroup group;
  Packing packing;
};

// INVALID_ARGUMENT: a field is wrong; the message names it.
absl::StatusOr<TransferGroup> ReadInitWeightTransfer(const v1::InitWeightTransferRequest& proto);

// The packing that the call asks for; `otherwise` if it asks for none.
Packing ReadPacking(const v1::ReceiveWeightsRequest& proto, const Packing& otherwise);

// The tensors of an update: the listed ones first, then the model's others, in the order of a
// forward pass and with the dtype of the first listed one.
std::vector<Tensor> WithUnlisted(std::vector<Tensor> listed, const TensorPlan& plan);

// The numbers in `all` of the listed tensors. INVALID_ARGUMENT, naming the tensor: `all` has none
// of its name, dtype and shape; or its number is in `came`; or it is listed twice.
absl::StatusOr<std::vector<size_t>> NumbersOf(absl::Span<const Tensor> listed,
                                              absl::Span<const Tensor> all,
                                              const std::set<size_t>& came);

// Tensors that come in one broadcast, one after the other.
struct Broadcast {
  std::vector<size_t> tensors;  // by number
  size_t bytes = 0;
};

// The broadcasts of the tensors `numbers` of `all`, in order. all: with sizes.
std::vector<Broadcast> BroadcastsOf(absl::Span<const size_t> numbers, absl::Span<const Tensor> all,
                                    const Packing& packing);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_TRANSFER_REQUESTS_H_
