// Buffers that each rank of a rollout writes and all ranks read once per step, over peer memory or
// NCCL. Not here: their content (step_draws.h).
#ifndef ISOBIT_KERNELS_RUNTIME_RANK_EXCHANGE_H_
#define ISOBIT_KERNELS_RUNTIME_RANK_EXCHANGE_H_

#include <array>
#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "common/base/rank_count.h"
#include "common/parallel/nccl_group.h"
#include "common/parallel/peer_group.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/sm90/collective/all_reduce.h"

namespace isobit {

// Sizes are those of one rank, and equal for all ranks.
enum class ExchangeBuffer { kLogits, kRangeResults, kDraws };
inline constexpr size_t kExchangeBuffers = 3;
using ExchangeBytes = std::array<size_t, kExchangeBuffers>;    // by ExchangeBuffer
using PeerBuffers = std::array<PeerMemory, kExchangeBuffers>;  // likewise

// One rank's end. All ranks make the same calls in the same order.
class RankExchange {
 public:
  virtual ~RankExchange() = default;

  // The buffer into which this rank writes.
  virtual std::byte* own(ExchangeBuffer buffer) const = 0;

  // Makes the rank's stream wait until all ranks have come here. Returns the addresses at which
  // later work on the stream reads the first `bytes` of each rank's buffer. A rank writes the same
  // buffer again only after the next Share, of any buffer, or the next sum over ranks.
  virtual absl::StatusOr<std::array<const std::byte*, kMaxRanks>> Share(ExchangeBuffer buffer,
                                                                        size_t bytes) = 0;
};

// Over memory that the ranks map. `peers`: the barrier; null with one rank, where nothing is
// shared. All arguments outlive the object.
std::unique_ptr<RankExchange> MakePeerExchange(const PeerBuffers& buffers, int rank, int num_ranks,
                                               cuda::PeerAllReduce* peers,
                                               const cuda::Stream& stream);

// By NCCL's all-gather, into memory of `device`. RESOURCE_EXHAUSTED: there is no memory.
absl::StatusOr<std::unique_ptr<RankExchange>> MakeNcclExchange(const ExchangeBytes& bytes,
                                                               NcclGroup& nccl, int num_ranks,
                                                               CudaDevice& device);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_RANK_EXCHANGE_H_
