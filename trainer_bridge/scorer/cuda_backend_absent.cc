// In place of cuda_backend.cc, in builds without CUDA.
#include "absl/status/status.h"
#include "trainer_bridge/scorer/rank_backend.h"

namespace isobit::scorer {

namespace {

absl::Status Absent() {
  return absl::UnimplementedError(
      "--backend=cuda: this isobit-scorer was built without CUDA (make build-gpu)");
}

}  // namespace

absl::StatusOr<std::string> NewGroupId() { return Absent(); }

absl::StatusOr<RankBackend> MakeCudaBackend(const CudaBackendOptions& /*options*/) {
  return Absent();
}

}  // namespace isobit::scorer
