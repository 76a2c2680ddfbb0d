// Checks of fields, and the list of broadcasts.
#include "rollout/service/transfer_requests.h"

#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/dtype.h"
#include "common/checkpoint/strict_json.h"  // Quoted
#include "common/checkpoint/tensor_plan.h"
#include "common/parallel/pickled_nccl_id.h"

namespace isobit {
namespace {

// More than any cluster has, and far from the end of int.
constexpr uint32_t kMaxRanks = 1 << 20;

std::string Described(const Tensor& tensor) {
  return absl::StrCat(SafetensorsName(tensor.dtype), " ", ShapeString(tensor.shape));
}

}  // namespace

absl::StatusOr<TransferGroup> ReadInitWeightTransfer(const v1::InitWeightTransferRequest& proto) {
  const bool has_id = !proto.nccl_unique_id().empty();
  const bool has_store = !proto.master_address().empty() || proto.master_port() != 0;
  if (has_id == has_store) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected master_address and master_port, or nccl_unique_id, got ",
                     has_id ? "both" : "neither"));
  }
  if (has_id && proto.nccl_unique_id().size() != kNcclIdBytes) {
    return absl::InvalidArgumentError(absl::StrCat("nccl_unique_id: expected ", kNcclIdBytes,
                                                   " bytes, got ", proto.nccl_unique_id().size()));
  }
  if (has_store && proto.master_address().empty()) {
    return absl::InvalidArgumentError("master_address: expected a host, got none");
  }
  if (has_store && (proto.master_port() < 1 || proto.master_port() > 65535)) {
    return absl::InvalidArgumentError(
        absl::StrCat("master_port: expected 1 to 65535, got ", proto.master_port()));
  }
  if (proto.world_size() < 2 || proto.world_size() > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("world_size: expected 2 to ", kMaxRanks, ", got ", proto.world_size()));
  }
  if (proto.rank_offset() < 1 || proto.rank_offset() >= proto.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank_offset: expected 1 to ", proto.world_size() - 1,
                     ", below world_size, got ", proto.rank_offset(), ": the trainer is rank 0"));
  }
  TransferGroup group{.store_host = proto.master_address(),
                      .store_port = static_cast<int>(proto.master_port()),
                      .group = {.id = proto.nccl_unique_id(),
                                .rank = static_cast<int>(proto.rank_offset()),
                                .size = static_cast<int>(proto.world_size())},
                      .packing = {.packed = proto.packed()}};
  if (proto.has_packed_buffer_size_bytes()) {
    group.packing.buffer_bytes = proto.packed_buffer_size_bytes();
  }
  return group;
}

Packing ReadPacking(const v1::ReceiveWeightsRequest& proto, const Packing& otherwise) {
  Packing packing = otherwise;
  if (proto.has_packed()) packing.packed = proto.packed();
  if (proto.has_packed_buffer_size_bytes()) packing.buffer_bytes = proto.packed_buffer_size_bytes();
  return packing;
}

std::vector<Tensor> WithUnlisted(std::vector<Tensor> listed, const TensorPlan& plan) {
  if (listed.empty()) return listed;
  std::set<std::string> names;
  for (const Tensor& tensor : listed) names.insert(tensor.name);
  const DType dtype = listed.front().dtype;
  for (const ExpectedTensor& expected : ExpectedTensors(plan)) {
    if (names.contains(expected.name)) continue;
    listed.push_back({.name = expected.name, .dtype = dtype, .shape = expected.shape});
  }
  return listed;
}

absl::StatusOr<std::vector<size_t>> NumbersOf(absl::Span<const Tensor> listed,
                                              absl::Span<const Tensor> all,
                                              const std::set<size_t>& came) {
  std::map<absl::string_view, size_t> by_name;
  for (size_t i = 0; i < all.size(); ++i) by_name.emplace(all[i].name, i);
  std::set<size_t> seen;
  std::vector<size_t> numbers;
  for (const Tensor& tensor : listed) {
    const auto found = by_name.find(tensor.name);
    if (found == by_name.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Quoted(tensor.name),
                       ": the update's first call gave no room for it: expected a tensor of the "
                       "model, a tied one beside all others"));
    }
    const size_t number = found->second;
    if (came.contains(number) || !seen.insert(number).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Quoted(tensor.name), ": expected once in an update, got twice"));
    }
    if (tensor.dtype != all[number].dtype || tensor.shape != all[number].shape) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", Quoted(tensor.name), ": expected ", Described(all[number]), ", got ",
          Described(tensor), "; tensors of several dtypes are listed in one call"));
    }
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<Broadcast> BroadcastsOf(absl::Span<const size_t> numbers, absl::Span<const Tensor> all,
                                    const Packing& packing) {
  std::vector<Broadcast> broadcasts;
  bool is_full = true;
  for (const size_t number : numbers) {
    if (is_full) broadcasts.emplace_back();
    Broadcast& last = broadcasts.back();
    last.tensors.push_back(number);
    last.bytes += all[number].size_bytes;
    is_full = !packing.packed || last.bytes > packing.buffer_bytes;
  }
  return broadcasts;
}

}  // namespace isobit
