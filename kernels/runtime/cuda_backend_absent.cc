// Of a build without CUDA. See cuda_backend.h.
#include "absl/status/status.h"
#include "kernels/runtime/cuda_backend.h"

namespace isobit {
namespace {

absl::Status Absent() {
  return absl::UnimplementedError(
      "--backend=cuda: this service was built without CUDA; 'make build-gpu' builds it with CUDA, "
      "in build/cuda");
}

}  // namespace

absl::StatusOr<MakeRank> MakeCudaRanks(const CudaRankOptions& /*options*/) { return Absent(); }

absl::StatusOr<int64_t> FreeGpuBytes(int /*device*/) { return Absent(); }

absl::StatusOr<RankBackend> MakeCudaBackend(const CudaBackendOptions& /*options*/) {
  return Absent();
}

JoinWeightBroadcast JoinNcclBroadcast(int /*device*/) {
  return [](const BroadcastGroup&, const PeerWait&) { return Absent(); };
}

absl::StatusOr<std::string> NewGroupId() { return Absent(); }

}  // namespace isobit
