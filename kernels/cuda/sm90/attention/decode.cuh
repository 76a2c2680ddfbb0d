// The kernel of the decode schedule by teams (decode.h): makes the list of items and distributes
// them over the teams of all blocks. One warp of a team loads, two compute.
//
// At a small batch, half of the kernel's time could pass before its first copy. That phase is kept
// short: some warps initialise the barriers while the others make the list, rarely run code is out
// of line (Gather), and shifts and comparisons replace divisions where possible.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CUH_

#include <cstdint>

#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/attention/decode_consumer.cuh"
#include "kernels/cuda/sm90/attention/decode_load.cuh"
#include "kernels/cuda/sm90/attention/decode_work.cuh"
#include "kernels/cuda/sm90/device/barrier.cuh"

namespace isobit::cuda {

// A team's share of the list (items first, first + stride, ... below end) and of shared memory.
template <typename Shape>
struct TeamShare {
  RingCursor<Shape> ring;
  int32_t first;
  int32_t stride;
  int32_t end;

  // Neighbouring items go to different multiprocessors, so that a short list uses all of them. If
  // the list is too short for all teams, busy teams also get the rings of idle teams.
  __device__ TeamShare(int32_t items, int team, uint32_t shared) {
    const int32_t blocks = static_cast<int32_t>(gridDim.x);
    const int teams = 1 + (items > blocks) + (items > 2 * blocks) + (items > 3 * blocks);
    static_assert(kTeams == 4);
    constexpr int kAll = Shape::kStages * kTeams;
    ring.stages = teams == 1 ? kAll : teams == 2 ? kAll / 2 : teams == 3 ? kAll / 3 : kAll / 4;
    ring.buffers = shared + team * ring.stages * Shape::kStageBytes;
    ring.barriers = shared + Shape::kBarriers + team * ring.stages * 16;
    first = team < teams ? team * blocks + static_cast<int32_t>(blockIdx.x) : items;
    stride = teams * blocks;
    end = items;
  }
};

template <typename Shape>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    DecodeKernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* const shared = unaligned + (1024 - SharedAddress(unaligned) % 1024) % 1024;
  ReleaseSuccessor();
  const uint32_t base = SharedAddress(shared);
  auto* const list = reinterpret_cast<int32_t*>(shared + Shape::kList);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool loads = warp >= kListThreads / 32;
  if (loads) PrepareToLoad<Shape>(p, base + Shape::kBarriers);  // while the others make the list
  // A copy before the step's first kernel made the tables, not the predecessor.
  MakeList<Shape>(p, list);

  const int team = loads ? warp - kListThreads / 32 : warp / kTeamConsumers;
  const TeamShare<Shape> share(list[Shape::kEntries * p.num_listed], team, base);
  if (loads) {
    DecodeProducer<Shape> producer(p, share.ring);
    for (int32_t i = share.first; i < share.end; i += share.stride) {
      producer.Run(DecodeItem::Find<Shape>(p, list, i));
    }
  } else {
    static_assert(sizeof(TeamExchange<Shape>) == Shape::kExchangeBytes);
    auto& exchange = *reinterpret_cast<TeamExchange<Shape>*>(shared + Shape::kExchange +
                                                             team * Shape::kExchangeBytes);
    auto* const totals =
        reinterpret_cast<float*>(shared + Shape::kTotals + team * Shape::kTotalBytes);
    DecodeConsumer<Shape> consumer(p, share.ring, team, exchange, totals);
    for (int32_t i = share.first; i < share.end; i += share.stride) {
      consumer.Run(DecodeItem::Find<Shape>(p, list, i));
    }
  }
  WaitForPredecessor();  // a block without items has not waited yet
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CUH_
