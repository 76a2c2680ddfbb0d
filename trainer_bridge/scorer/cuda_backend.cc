// Ranks on GPUs. See rank_backend.h.
#include <utility>

#include "common/base/status_macros.h"
#include "common/parallel/nccl_block_gather.h"
#include "common/parallel/nccl_group.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device/device_info.h"
#include "trainer_bridge/scorer/rank_backend.h"

namespace isobit::scorer {

absl::StatusOr<std::string> NewGroupId() { return NewNcclId(); }

absl::StatusOr<RankBackend> MakeCudaBackend(const CudaBackendOptions& options) {
  for (const int device : options.devices) {
    ISOBIT_RETURN_IF_ERROR(cuda::GetDeviceInfo(device).status());
  }
  std::string id = options.nccl_id;
  if (id.empty() && options.num_shards > 1) {
    ISOBIT_ASSIGN_OR_RETURN(id, NewNcclId());
  }
  RankBackend backend;
  backend.make_ops = [options](int local_rank) -> absl::StatusOr<std::unique_ptr<Ops>> {
    return MakeCudaOps(
        {.device = options.devices[static_cast<size_t>(local_rank)], .mode = options.numerics});
  };
  backend.make_gather = [options, id](
                            int local_rank, Ops& ops,
                            size_t block_bytes) -> absl::StatusOr<std::unique_ptr<BlockGather>> {
    ISOBIT_ASSIGN_OR_RETURN(
        std::unique_ptr<NcclGroup> group,
        NcclGroup::Create({.id = id,
                           .rank = options.first_rank + local_rank,
                           .size = options.num_shards,
                           .device = options.devices[static_cast<size_t>(local_rank)],
                           .timeout = options.timeout}));
    // make_ops made them.
    const auto& cuda_ops = static_cast<const CudaOps&>(ops);
    return MakeNcclBlockGather(std::move(group), block_bytes, cuda_ops.stream().handle,
                               options.timeout);
  };
  return backend;
}

}  // namespace isobit::scorer
