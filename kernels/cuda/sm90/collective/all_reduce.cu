// The state in peer memory, the kernel's launcher and PeerAllReduce.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/sm90/collective/all_reduce.cuh"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "kernels/cuda/sm90/collective/all_reduce_schedule.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {
namespace {

int32_t QuadsOf(int64_t hidden) { return static_cast<int32_t>(CeilDiv(hidden, kQuad)); }

// Clusters of the kernel that the current device holds at once.
absl::StatusOr<int> ResidentClusters(AllReduceKernel kernel, const AllReduceSchedule& schedule,
                                     int num_sms) {
  int count = 0;
  if (schedule.cluster == 1) {
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, schedule.threads, 0));
    return count * num_sms;
  }
  const auto cluster = static_cast<unsigned>(schedule.cluster);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(static_cast<unsigned>(schedule.threads));
  config.attrs = &attribute;
  config.numAttrs = 1;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
  return count;
}

}  // namespace

struct AllReduceState {
  // A schedule for this hidden size, and the most clusters that a launch may have: all of them must
  // run at once on every device, because a block waits for its counterparts on the other ranks.
  struct Plan {
    AllReduceSchedule schedule;
    int64_t clusters = 0;
  };

  AllReduceState(const PeerGroup& group, const AllReduceOptions& options)
      : group(group), options(options) {}
  ~AllReduceState() {
    memory = {};  // waits for the devices
    if (reports != nullptr) cudaFreeHost(reports);
  }

  bool alone() const { return group.most_ranks_on_a_device() == 1; }
  absl::Status AllocateMemory();
  absl::Status PlanSchedules();

  PeerGroup group;
  AllReduceOptions options;
  size_t mailbox_bytes = 0;
  PeerMemory memory;            // of each rank: RankSignals, mailbox, mailbox
  uint32_t* reports = nullptr;  // RankGroup::reports
  std::vector<Plan> plans;
};

absl::Status AllReduceState::AllocateMemory() {
  for (int64_t rows = 1; rows <= options.max_rows; ++rows) {
    const AllReduceSchedule schedule = ChooseAllReduce(rows, options.hidden, group.size());
    const int64_t bytes = MailboxBytes(schedule, rows, options.hidden, group.size());
    mailbox_bytes = std::max(mailbox_bytes, static_cast<size_t>(bytes));
  }
  mailbox_bytes = RoundUp(mailbox_bytes, 256);
  ISOBIT_ASSIGN_OR_RETURN(memory, group.Allocate(sizeof(RankSignals) + 2 * mailbox_bytes, 0xff));
  for (int r = 0; r < group.size(); ++r) {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemset(memory.of_rank(r), 0, sizeof(RankSignals)));
  }
  // The ranks' streams do not wait for the memory to be set.
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  const size_t bytes = static_cast<size_t>(group.size()) * sizeof(uint32_t);
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaHostAlloc(reinterpret_cast<void**>(&reports), bytes,
                                            cudaHostAllocPortable | cudaHostAllocMapped));
  std::fill_n(reports, group.size(), 0u);
  return absl::OkStatus();
}

absl::Status AllReduceState::PlanSchedules() {
  for (int64_t rows = 1; rows <= options.max_rows; ++rows) {
    const AllReduceSchedule schedule = ChooseAllReduce(rows, options.hidden, group.size());
    const auto same = [&](const Plan& plan) { return plan.schedule == schedule; };
    if (std::ranges::none_of(plans, same)) plans.push_back({schedule, INT64_MAX});
  }
  // Ranks that share a device leave room for each other and for the other kernels of their streams.
  const int share = alone() ? 1 : 2 * group.most_ranks_on_a_device();
  for (int r = 0; r < group.size(); ++r) {
    ISOBIT_ASSIGN_OR_RETURN(const DeviceInfo info, GetDeviceInfo(group.device(r)));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(group.device(r)));
    cudaFuncAttributes attributes;
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, BarrierKernel));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, AwaitKernel));
    for (Plan& plan : plans) {
      for (const bool aligned : {false, true}) {
        const AllReduceKernel kernel = options.kernels(plan.schedule, group.size(), aligned);
        ISOBIT_ASSIGN_OR_RETURN(const int clusters,
                                ResidentClusters(kernel, plan.schedule, info.num_sms));
        plan.clusters = std::min<int64_t>(plan.clusters, std::max(2, clusters / share));
      }
    }
  }
  return absl::OkStatus();
}

AllReduceKernel TreeAllReduceKernel(const AllReduceSchedule& schedule, int ranks, bool aligned) {
  return AllReduceKernelFor<TreeOrder>(schedule, ranks, aligned);
}

absl::StatusOr<std::vector<std::unique_ptr<PeerAllReduce>>> PeerAllReduce::Create(
    const PeerGroup& group, const AllReduceOptions& options) {
  constexpr int64_t kMostRows = 32768;  // so that 32 bits count the elements of a mailbox
  if (options.hidden < 1 || options.hidden > kMaxAllReduceHidden || options.max_rows < 1 ||
      options.max_rows > kMostRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("an all-reduce of up to ", options.max_rows, " rows of ", options.hidden,
                     " columns: expected 1 to ", kMostRows, " rows of 1 to ", kMaxAllReduceHidden));
  }
  if (options.timeout <= absl::ZeroDuration() || options.timeout > absl::Minutes(10)) {
    return absl::InvalidArgumentError(absl::StrCat("an all-reduce that waits ",
                                                   absl::FormatDuration(options.timeout),
                                                   ": expected more than 0 and at most 10 min"));
  }
  auto state = std::make_shared<AllReduceState>(group, options);
  if (group.size() > 1) {
    int device = 0;
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
    ISOBIT_RETURN_IF_ERROR(state->PlanSchedules());
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device));
    ISOBIT_RETURN_IF_ERROR(state->AllocateMemory());
  }
  std::vector<std::unique_ptr<PeerAllReduce>> ends;
  for (int r = 0; r < group.size(); ++r) {
    ends.push_back(std::unique_ptr<PeerAllReduce>(new PeerAllReduce(state, r)));
  }
  return ends;
}

PeerAllReduce::PeerAllReduce(std::shared_ptr<AllReduceState> state, int rank)
    : state_(std::move(state)), rank_(rank), push_(std::make_unique<PartialPush>()) {}
PeerAllReduce::~PeerAllReduce() = default;

size_t PeerAllReduce::bytes() const { return state_->memory.bytes(); }

const PartialPush* PeerAllReduce::Push(int64_t rows) {
  const AllReduceState& state = *state_;
  const int ranks = state.group.size();
  const PushOptions& options = state.options.push;
  const PushTable table = PushTableOf(ranks);
  const int64_t most = options.rows < 0 ? table.rows : options.rows;
  const double bytes_per_us = options.bytes_per_us < 0 ? table.bytes_per_us : options.bytes_per_us;
  if (ranks == 1 || rows > std::min(most, state.options.max_rows)) return nullptr;
  const int64_t hidden = state.options.hidden;
  const bool two_shots = ChooseAllReduce(rows, hidden, ranks).two_shots;
  const double copies = two_shots ? 1 - 1.0 / ranks : ranks - 1;  // of a row, that cross links
  const double bytes_of_row = copies * static_cast<double>(hidden * int64_t{sizeof(float)});
  *push_ = {.group = Group(),
            .mailbox_bytes = state.mailbox_bytes,
            .quads = QuadsOf(hidden),
            .two_shots = two_shots,
            .us_of_row = bytes_per_us > 0 ? bytes_of_row / bytes_per_us : 0};
  return push_.get();
}

RankGroup PeerAllReduce::Group() const {
  RankGroup group = {};
  group.size = state_->group.size();
  group.rank = rank_;
  group.reports = state_->reports;
  group.timeout = static_cast<uint32_t>(absl::ToInt64Nanoseconds(state_->options.timeout) / kTick);
  for (int q = 0; q < group.size; ++q) group.memory[q] = state_->memory.of_rank(q);
  return group;
}

absl::Status PeerAllReduce::Norm(const float* partial, const RmsNormArgs& norm,
                                 const Stream& stream) {
  const AllReduceState& state = *state_;
  if (norm.hidden != state.options.hidden) {
    return absl::InvalidArgumentError(absl::StrCat("an all-reduce of rows of ", norm.hidden,
                                                   " columns: expected ", state.options.hidden));
  }
  const int ranks = state.group.size();
  if (ranks == 1) {
    RmsNormArgs args = norm;
    args.sum = partial;
    return Run(args, stream);
  }
  for (int64_t begin = 0; begin < norm.rows; begin += state.options.max_rows) {
    AllReduceJob job = {.group = Group(),
                        .mailbox_bytes = state.mailbox_bytes,
                        .partial = partial == nullptr ? nullptr : partial + begin * norm.hidden,
                        .norm = norm,
                        .alone = state.alone()};
    job.quads = QuadsOf(norm.hidden);
    job.pieces = PiecesOf(job.quads);
    job.norm.residual += begin * norm.hidden;
    job.norm.out += begin * norm.hidden;
    job.norm.rows = std::min(norm.rows - begin, state.options.max_rows);
    const AllReduceSchedule schedule = ChooseAllReduce(job.norm.rows, norm.hidden, ranks);
    const auto& plan = *std::ranges::find(state.plans, schedule, &AllReduceState::Plan::schedule);
    // One cluster runs the barrier with the peers. If clusters take several rows each, their number
    // is made odd: every cluster then takes some rows that this rank owns.
    int64_t clusters = std::min(job.norm.rows, plan.clusters - 1);
    if (clusters < job.norm.rows && clusters % 2 == 0) --clusters;
    job.cluster = schedule.cluster;
    job.clusters = static_cast<int>(clusters);
    const bool aligned = norm.hidden % kQuad == 0 && Aligned16(job.partial, norm.bias, norm.weight,
                                                               job.norm.residual, job.norm.out);
    const Grid grid = {.blocks = dim3(static_cast<unsigned>((clusters + 1) * schedule.cluster)),
                       .threads = dim3(static_cast<unsigned>(schedule.threads)),
                       .cluster = schedule.cluster};
    ISOBIT_RETURN_IF_ERROR(
        Launch(state.options.kernels(schedule, ranks, aligned), grid, stream, job));
  }
  return absl::OkStatus();
}

absl::Status PeerAllReduce::Barrier(const Stream& stream) {
  if (state_->group.size() == 1) return absl::OkStatus();
  return Launch(BarrierKernel, {.blocks = dim3(1), .threads = dim3(kWarp)}, stream, Group(),
                state_->alone());
}

absl::Status PeerAllReduce::Await(const uint32_t* counts, uint32_t wanted, const Stream& stream) {
  if (state_->group.size() == 1) return absl::OkStatus();
  return Launch(AwaitKernel, {.blocks = dim3(1), .threads = dim3(kWarp)}, stream, Group(), counts,
                wanted, state_->alone());
}

absl::Status PeerAllReduce::Check() const {
  if (state_->reports == nullptr) return absl::OkStatus();
  const uint32_t word = __atomic_load_n(state_->reports + rank_, __ATOMIC_ACQUIRE);
  if (word == 0) return absl::OkStatus();
  std::vector<int> missing;
  for (int q = 0; q < state_->group.size(); ++q) {
    if ((word >> q & 1u) != 0) missing.push_back(q);
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", word >> kReporterShift & 0xffu, " waited ",
      absl::FormatDuration(state_->options.timeout), " in an all-reduce or barrier; ",
      missing.empty() ? "all ranks had begun it"
                      : absl::StrCat("not begun by rank ", absl::StrJoin(missing, ", "))));
}

}  // namespace isobit::cuda
