// A kernel with the device code of kernels/cuda/common/device that no kernel of common/ calls, so
// that it is compiled for other architectures, too. It never runs.
#include "kernels/cuda/common/device/async_copy.cuh"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/common/device/partial_push.cuh"
#include "kernels/cuda/common/device/rank_signals.cuh"
#include "kernels/cuda/common/device/shared_address.cuh"

namespace isobit::cuda {

__global__ void CallsWhatOthersDoNot(PartialPush push, const uint32_t* counts, float4* sums) {
  __shared__ uint4 unit;
  CopyUnit(SharedAddress(&unit), sums);
  CommitUnits();
  WaitForCommitGroups<0>();
  WaitForUnits();
  float d[4] = {};
  MmaSync(d, {unit.x, unit.y, unit.z, unit.w}, {unit.x, unit.y});
  Operation operation(push.group);
  AnnounceOperation(push.group);
  operation.TakeTicket();
  const float4 rows[2] = {sums[1], {d[0], d[1], d[2], d[3]}};
  PushQuads(push, NextOperation(push), 0, 16, static_cast<int>(threadIdx.x), rows);
  operation.AwaitPeers();
  Arrivals(push.group, counts, operation.number()).Await();
  operation.End();
}

}  // namespace isobit::cuda
