// Captures one graph for each rank and times replays that start together.
#include "bench/kernels/ranks.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit::bench {

// A captured sequence of calls: one graph for each rank.
class RankTeam::Graph {
 public:
  explicit Graph(const RankTeam& team)
      : team_(team), executables_(static_cast<size_t>(team.size())) {}
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    for (cudaGraphExec_t executable : executables_) {
      if (executable != nullptr) cudaGraphExecDestroy(executable);
    }
  }

  absl::Status Capture(const RankContender& contender, int64_t calls) {
    std::vector<cuda::Stream> streams;
    ISOBIT_RETURN_IF_ERROR(team_.Each([&](int r) {
      streams.push_back(
          {.handle = team_.stream(r), .dependent = contender.dependent, .card = &team_.card()});
      ISOBIT_RETURN_IF_CUDA_ERROR(
          cudaStreamBeginCapture(team_.stream(r), cudaStreamCaptureModeRelaxed));
      return absl::OkStatus();
    }));
    absl::Status status;
    for (int64_t i = 0; i < calls && status.ok(); ++i) status = contender.call(i, streams);
    ISOBIT_RETURN_IF_ERROR(team_.Each([&](int r) {
      cudaGraph_t graph = nullptr;
      ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamEndCapture(team_.stream(r), &graph));
      const cudaError_t made =
          cudaGraphInstantiate(&executables_[static_cast<size_t>(r)], graph, 0);
      cudaGraphDestroy(graph);
      ISOBIT_RETURN_IF_CUDA_ERROR(made);
      ISOBIT_RETURN_IF_CUDA_ERROR(
          cudaGraphUpload(executables_[static_cast<size_t>(r)], team_.stream(r)));
      ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(team_.stream(r)));
      return absl::OkStatus();
    }));
    return status;
  }

  absl::Status Replay(int rank) const {
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaGraphLaunch(executables_[static_cast<size_t>(rank)], team_.stream(rank)));
    return absl::OkStatus();
  }

 private:
  const RankTeam& team_;
  std::vector<cudaGraphExec_t> executables_;
};

absl::StatusOr<std::unique_ptr<RankTeam>> RankTeam::Create(int size) {
  std::vector<int> devices(static_cast<size_t>(size));
  std::iota(devices.begin(), devices.end(), 0);
  ISOBIT_ASSIGN_OR_RETURN(PeerGroup group, PeerGroup::Create(devices));
  ISOBIT_ASSIGN_OR_RETURN(const cuda::Card card, cuda::GetCard(0));
  std::unique_ptr<RankTeam> team(new RankTeam(std::move(group), card));
  ISOBIT_ASSIGN_OR_RETURN(team->starters_,
                          cuda::PeerAllReduce::Create(team->group_, {.hidden = 1, .max_rows = 1}));
  ISOBIT_RETURN_IF_ERROR(team->Each([&](int) {
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaStreamCreateWithFlags(&team->streams_.emplace_back(nullptr), cudaStreamNonBlocking));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventCreate(&team->begins_.emplace_back(nullptr)));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventCreate(&team->ends_.emplace_back(nullptr)));
    return absl::OkStatus();
  }));
  return team;
}

RankTeam::~RankTeam() {
  for (cudaEvent_t event : begins_) cudaEventDestroy(event);
  for (cudaEvent_t event : ends_) cudaEventDestroy(event);
  for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
}

absl::Status RankTeam::Each(const std::function<absl::Status(int rank)>& work) const {
  for (int r = 0; r < size(); ++r) {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(group_.device(r)));
    ISOBIT_RETURN_IF_ERROR(work(r));
  }
  return absl::OkStatus();
}

// The streams wait until the host has queued all work, then for each other: otherwise the time of a
// graph that comes late would include the other ranks' wait.
absl::StatusOr<double> RankTeam::Time(const Graph& graph) {
  std::atomic<bool> open = false;
  const auto gate = [](void* flag) { static_cast<std::atomic<bool>*>(flag)->wait(false); };
  const absl::Status launched = Each([&](int r) {
    const auto i = static_cast<size_t>(r);
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaLaunchHostFunc(streams_[i], gate, &open));
    ISOBIT_RETURN_IF_ERROR(starters_[i]->Barrier({.handle = streams_[i], .dependent = false}));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventRecord(begins_[i], streams_[i]));
    ISOBIT_RETURN_IF_ERROR(graph.Replay(r));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventRecord(ends_[i], streams_[i]));
    return absl::OkStatus();
  });
  open = true;
  open.notify_all();
  double slowest = 0;
  ISOBIT_RETURN_IF_ERROR(Each([&](int r) {
    const auto i = static_cast<size_t>(r);
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(streams_[i]));
    ISOBIT_RETURN_IF_ERROR(launched);
    float milliseconds = 0;
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, begins_[i], ends_[i]));
    slowest = std::max(slowest, 1e3 * static_cast<double>(milliseconds));
    return starters_[i]->Check();
  }));
  return slowest;
}

absl::StatusOr<RaceTimes> RankTeam::Race(absl::Span<const RankContender> contenders, int64_t calls,
                                         int replays) {
  constexpr int kWarmUp = 3;
  std::vector<std::unique_ptr<Graph>> graphs;
  for (const RankContender& contender : contenders) {
    graphs.push_back(std::make_unique<Graph>(*this));
    ISOBIT_RETURN_IF_ERROR(graphs.back()->Capture(contender, calls));
  }
  RaceTimes times(contenders.size());
  for (int i = -kWarmUp; i < replays; ++i) {
    for (size_t c = 0; c < contenders.size(); ++c) {
      ISOBIT_ASSIGN_OR_RETURN(const double elapsed, Time(*graphs[c]));
      if (i >= 0) times[c].push_back(elapsed / static_cast<double>(calls));
    }
  }
  return times;
}

}  // namespace isobit::bench
