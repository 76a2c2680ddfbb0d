// Where the scorer's ranks compute: the backend of each rank, and how blocks are gathered.
#ifndef ISOBIT_KERNELS_RUNTIME_RANK_BACKEND_H_
#define ISOBIT_KERNELS_RUNTIME_RANK_BACKEND_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "common/parallel/block_gather.h"
#include "kernels/backend.h"
#include "kernels/device.h"
#include "kernels/host_device.h"

namespace isobit {

// Makes the backends of this process's ranks; `local_rank` counts from 0. All backends of a scorer
// have equal layouts of packed weights.
struct RankBackend {
  // Makes a rank's ops, for its passes.
  std::function<absl::StatusOr<std::unique_ptr<Backend>>(int local_rank)> make_ops;
  // Makes the device for a version of a rank's weights. Called for each version, so that filling
  // its memory does not disturb passes.
  std::function<absl::StatusOr<std::unique_ptr<Device>>(int local_rank)> make_device =
      [](int) -> absl::StatusOr<std::unique_ptr<Device>> { return std::make_unique<HostDevice>(); };
  // Makes a rank's gather of blocks of at most `block_bytes` bytes for its ops. Called after
  // make_ops, for all ranks at the same time, if there are several. Null: all ranks are threads of
  // this process and compute in host memory.
  std::function<absl::StatusOr<std::unique_ptr<BlockGather>>(int local_rank, size_t block_bytes)>
      make_gather = nullptr;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_RANK_BACKEND_H_
