// Races between contenders that run on several GPUs at once: their graphs start together, and the
// slowest GPU's end counts.
#ifndef ISOBIT_BENCH_KERNELS_RANKS_H_
#define ISOBIT_BENCH_KERNELS_RANKS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bench/kernels/harness.h"
#include "common/parallel/peer_group.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "kernels/cuda/sm90/device/card.h"

namespace isobit::bench {

// Call number i of `call` puts its work on every rank's stream.
struct RankContender {
  bool dependent = true;  // programmatic dependent launch
  std::function<absl::Status(int64_t i, absl::Span<const cuda::Stream> streams)> call;
};

// Ranks 0 .. size-1 on GPUs 0 .. size-1.
class RankTeam {
 public:
  static absl::StatusOr<std::unique_ptr<RankTeam>> Create(int size);
  RankTeam(const RankTeam&) = delete;
  RankTeam& operator=(const RankTeam&) = delete;
  ~RankTeam();

  int size() const { return group_.size(); }
  const PeerGroup& group() const { return group_; }
  const cuda::Card& card() const { return card_; }  // every rank's
  cudaStream_t stream(int rank) const { return streams_[static_cast<size_t>(rank)]; }

  // Calls `work` for each rank with its device current, until one call fails.
  absl::Status Each(const std::function<absl::Status(int rank)>& work) const;

  // Captures calls 0 .. calls-1 of each contender into a graph on each rank, and replays the graphs
  // `replays` times, contenders in turn. Returns the microseconds of a call on the slowest rank,
  // [contender][replay].
  absl::StatusOr<RaceTimes> Race(absl::Span<const RankContender> contenders, int64_t calls,
                                 int replays);

 private:
  class Graph;

  RankTeam(PeerGroup group, const cuda::Card& card) : group_(std::move(group)), card_(card) {}
  // Microseconds of one replay.
  absl::StatusOr<double> Time(const Graph& graph);

  const PeerGroup group_;
  const cuda::Card card_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> begins_;
  std::vector<cudaEvent_t> ends_;
  std::vector<std::unique_ptr<cuda::PeerAllReduce>> starters_;
};

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_RANKS_H_
