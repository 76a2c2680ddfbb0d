// Converts probes between messages and the forward pass, for rollout and scorer. Templates, since
// the forward pass's types belong to a layer above common.
#ifndef ISOBIT_COMMON_RPC_PROBE_PROTO_H_
#define ISOBIT_COMMON_RPC_PROBE_PROTO_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/rpc/server_info.h"
#include "isobit/v1/types.pb.h"

namespace isobit {

// Wanted: ProbeWanted of kernels/model/forward_probe.h. INVALID_ARGUMENT: the op does not exist, or
// a row comes without a site or is beyond the tokens.
template <typename Wanted>
absl::StatusOr<Wanted> ReadProbe(const v1::ProbeRequest& request) {
  Wanted wanted;
  if (request.has_row() && !request.has_site()) {
    return absl::InvalidArgumentError("row: expected a site with it");
  }
  if (request.has_row() && request.row() >= static_cast<uint32_t>(request.token_ids_size())) {
    return absl::InvalidArgumentError(absl::StrCat("row: ", request.row(), ", expected less than ",
                                                   request.token_ids_size(),
                                                   ", the number of token_ids"));
  }
  if (!request.has_site()) return wanted;
  const int op = request.site().op();
  if (op <= v1::PROBE_OP_UNSPECIFIED || op > v1::ProbeOp_MAX) {
    return absl::InvalidArgumentError(absl::StrCat("site.op: ", op, ", expected an op"));
  }
  if (request.site().layer() > 0xFFFF) {
    return absl::InvalidArgumentError(
        absl::StrCat("site.layer: ", request.site().layer(), ", expected a layer"));
  }
  auto& site = wanted.site.emplace();
  site.layer = static_cast<int>(request.site().layer());
  site.op = static_cast<decltype(site.op)>(op - 1);  // the enums have the same order
  if (request.has_row()) wanted.row = request.row();
  return wanted;
}

// Result: ProbeResult of kernels/model/forward_probe.h. Fills in all but the fingerprint.
template <typename Result>
void WriteProbe(const Result& result, bool with_tensors, v1::ProbeResponse& response) {
  const auto& report = result.report;
  for (const auto& digest : report.digests) {
    auto& message = *response.add_digests();
    message.mutable_site()->set_layer(static_cast<uint32_t>(digest.site.layer));
    message.mutable_site()->set_op(static_cast<v1::ProbeOp>(static_cast<int>(digest.site.op) + 1));
    message.set_digest(digest.digest);
  }
  response.mutable_row_digests()->Add(report.row_digests.begin(), report.row_digests.end());
  response.mutable_values()->Add(report.values.begin(), report.values.end());
  *response.mutable_weight_version() = WeightVersionToProto(result.version);
  if (!with_tensors || result.version.tensors == nullptr) return;
  for (const auto& [name, tensor] : *result.version.tensors) {
    (*response.mutable_tensors())[name] = tensor.digest;
  }
}

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_PROBE_PROTO_H_
