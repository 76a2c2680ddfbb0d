// What the calls of a weight transfer ask for, read and checked: the trainer's group, and which
// tensors come in which broadcast. Not here: the transfer itself (weight_transfer.h).
#ifndef ISOBIT_ROLLOUT_TRANSFER_REQUESTS_H_
#define ISOBIT_ROLLOUT_TRANSFER_REQUESTS_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/safetensors.h"
#include "common/parallel/weight_broadcast.h"
#include "isobit/v1/rollout.pb.h"

namespace isobit {

// How tensors come in broadcasts.
struct Packing {
  bool packed = false;  // else each by itself
  // A packed broadcast ends with the tensor that makes it longer.
  uint64_t buffer_bytes = uint64_t{1} << 30;
};

struct TransferGroup {
  std::string store_host;  // of the store that has the id; empty: the id is in `group`
  int store_port = 0;
  BroadcastGroup group;
  Packing packing;
};

// INVALID_ARGUMENT names the field.
absl::StatusOr<TransferGroup> ReadInitWeightTransfer(const v1::InitWeightTransferRequest& proto);

// What a call says, else `otherwise`.
Packing ReadPacking(const v1::ReceiveWeightsRequest& proto, const Packing& otherwise);

// The tensors of an update that begins with `listed`: these, then the model's others in the order
// of a forward pass, with the dtype of the first listed one.
std::vector<Tensor> WithUnlisted(std::vector<Tensor> listed, const ModelConfig& config);

// The numbers in `all` of the tensors of a list. INVALID_ARGUMENT, naming the tensor: there is none
// of that name, dtype and shape in `all`, or its number is in `came`, or it is listed twice.
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

#endif  // ISOBIT_ROLLOUT_TRANSFER_REQUESTS_H_
