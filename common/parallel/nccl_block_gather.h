// Gathers between GPUs: NCCL's all-gather on a stream of its own. Events order it with the ops, so
// the host never waits during a pass.
#ifndef ISOBIT_COMMON_PARALLEL_NCCL_BLOCK_GATHER_H_
#define ISOBIT_COMMON_PARALLEL_NCCL_BLOCK_GATHER_H_

#include <memory>

#include "common/parallel/block_gather.h"
#include "common/parallel/nccl_group.h"

namespace isobit {

// `ops`: the stream of this rank's ops, on the group's device; it outlives the result. block_bytes:
// size of the largest gathered block. All ranks call it together. Errors: as NcclGroup::Allocate.
absl::StatusOr<std::unique_ptr<BlockGather>> MakeNcclBlockGather(std::unique_ptr<NcclGroup> group,
                                                                 size_t block_bytes,
                                                                 CUstream_st* ops,
                                                                 std::chrono::milliseconds timeout);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_NCCL_BLOCK_GATHER_H_
