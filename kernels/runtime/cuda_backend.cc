// Of a build with CUDA. See cuda_backend.h.
#include "kernels/runtime/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "common/parallel/nccl_block_gather.h"
#include "common/parallel/nccl_broadcast.h"
#include "common/parallel/nccl_group.h"
#include "common/parallel/nccl_weight_senders.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "kernels/runtime/cuda_executor.h"

namespace isobit {

absl::StatusOr<MakeRank> MakeCudaRanks(const CudaRankOptions& options) {
  return MakeCudaRank(options);
}

absl::StatusOr<int64_t> FreeGpuBytes(int device) {
  ISOBIT_RETURN_IF_ERROR(cuda::GetDeviceInfo(device).status());
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device));
  size_t free = 0;
  size_t all = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &all));
  return static_cast<int64_t>(free);
}

JoinWeightBroadcast JoinNcclBroadcast(int device) { return NcclBroadcastOn(device); }

absl::StatusOr<std::string> NewGroupId() { return NewNcclId(); }

absl::StatusOr<RankBackend> MakeCudaBackend(const CudaBackendOptions& options) {
  for (const int device : options.devices) {
    ISOBIT_RETURN_IF_ERROR(cuda::GetDeviceInfo(device).status());
  }
  std::string id = options.nccl_id;
  if (id.empty() && options.num_shards > 1) {
    ISOBIT_ASSIGN_OR_RETURN(id, NewNcclId());
  }
  // A rank's ops and gathers follow each other on one stream.
  auto streams = std::make_shared<std::vector<CudaStream>>();
  for (const int device : options.devices) {
    ISOBIT_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(device));
    streams->push_back(std::move(stream));
  }
  const auto device_of = [options](int local_rank) {
    return options.devices[static_cast<size_t>(local_rank)];
  };
  const auto stream_of = [streams](int local_rank) {
    return (*streams)[static_cast<size_t>(local_rank)].handle();
  };
  RankBackend backend;
  backend.make_ops = [=](int local_rank) -> absl::StatusOr<std::unique_ptr<Backend>> {
    return CudaBackend::Create({.device = device_of(local_rank),
                                .mode = options.numerics,
                                .stream = stream_of(local_rank)});
  };
  backend.make_device = [=](int local_rank) -> absl::StatusOr<std::unique_ptr<Device>> {
    ISOBIT_ASSIGN_OR_RETURN(auto device, CudaDevice::Create(device_of(local_rank)));
    device->SetWeightSenders(MakeNcclWeightSenders(device->ordinal(), device->side_stream()));
    return device;
  };
  backend.make_gather = [=](int local_rank,
                            size_t block_bytes) -> absl::StatusOr<std::unique_ptr<BlockGather>> {
    ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<NcclGroup> group,
                            NcclGroup::Create({.id = id,
                                               .rank = options.first_rank + local_rank,
                                               .size = options.num_shards,
                                               .device = device_of(local_rank),
                                               .timeout = options.timeout}));
    return MakeNcclBlockGather(std::move(group), block_bytes, stream_of(local_rank),
                               options.timeout);
  };
  return backend;
}

}  // namespace isobit
