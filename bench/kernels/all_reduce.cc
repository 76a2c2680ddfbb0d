// The subcommand `allreduce` of isobit-bench: the sum over ranks that ends a row-parallel layer,
// fused with the norm, beside NCCL's; and such a layer with its sum.
#include "kernels/cuda/sm90/collective/all_reduce.h"

#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/gpu.h"
#include "bench/kernels/push.h"
#include "bench/kernels/ranks.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/sm90/collective/all_reduce_schedule.h"
#include "kernels/cuda/sm90/device/device_info.h"

ABSL_FLAG(std::vector<std::string>, ranks, std::vector<std::string>({"2", "4", "8"}),
          "allreduce: group sizes; those beyond the machine's GPUs are left out");
ABSL_FLAG(std::vector<std::string>, rows,
          std::vector<std::string>({"1", "2", "4", "8", "16", "32", "64", "128", "256", "512",
                                    "1024", "2048", "4096", "8192"}),
          "allreduce: rows of 4096 columns");

namespace isobit::bench {
namespace {

constexpr int64_t kHidden = 4096;

absl::Status NcclStatus(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", ncclGetErrorString(result)));
}
#define ISOBIT_RETURN_IF_NCCL_ERROR(call) ISOBIT_RETURN_IF_ERROR(NcclStatus((call), #call))

// The largest share of NCCL's time that ours may take; 0: no target.
double TargetOf(int ranks, int64_t rows) {
  if (ranks != 4) return 0;
  const int64_t kilobytes = rows * kHidden * static_cast<int64_t>(sizeof(Bf16)) / 1024;
  if (kilobytes <= 512) return 0.6;
  if (kilobytes <= 2048) return 0.75;
  if (kilobytes <= 8192) return 1.1;
  return kilobytes <= 32768 ? 1.4 : 0;
}

// A group's operands, for messages of up to `most_rows` rows, in two sets that calls use in turn.
class Operands {
 public:
  static absl::StatusOr<std::unique_ptr<Operands>> Create(RankTeam& team, int64_t most_rows) {
    std::unique_ptr<Operands> o(new Operands(team));
    const auto count = static_cast<size_t>(most_rows * kHidden);
    ISOBIT_RETURN_IF_ERROR(team.Each([&](int r) {
      Rank& rank = o->ranks_.emplace_back();
      const auto seed = static_cast<uint32_t>(10 * r);
      for (int set = 0; set < 2; ++set) {
        ISOBIT_ASSIGN_OR_RETURN(rank.partial[set], RandomFp32(count * 4, seed + set, 0.1f));
        ISOBIT_ASSIGN_OR_RETURN(rank.narrow[set], RandomBf16(count * 2, seed + set, 0.1f));
      }
      ISOBIT_ASSIGN_OR_RETURN(rank.residual, RandomBf16(count * 2, 5, 1.0f));
      ISOBIT_ASSIGN_OR_RETURN(rank.sum, AllocateDevice(count * 2));
      ISOBIT_ASSIGN_OR_RETURN(rank.out, AllocateDevice(count * 2));
      ISOBIT_ASSIGN_OR_RETURN(rank.weight, RandomBf16(kHidden * 2, 6, 1.0f));
      return absl::OkStatus();
    }));
    std::vector<int> devices;
    for (int r = 0; r < team.size(); ++r) devices.push_back(team.group().device(r));
    o->comms_.resize(devices.size());
    ISOBIT_RETURN_IF_NCCL_ERROR(ncclCommInitAll(o->comms_.data(), team.size(), devices.data()));
    ISOBIT_ASSIGN_OR_RETURN(o->ends_,
                            cuda::PeerAllReduce::Create(team.group(), {.hidden = kHidden}));
    return o;
  }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;
  ~Operands() {
    for (ncclComm_t comm : comms_) ncclCommDestroy(comm);
  }

  absl::Status Ours(int64_t rows, int64_t i, absl::Span<const cuda::Stream> streams) {
    return team_.Each([&](int r) {
      const Rank& rank = ranks_[static_cast<size_t>(r)];
      return ends_[static_cast<size_t>(r)]->Norm(
          reinterpret_cast<const float*>(rank.partial[i % 2].get()), Norm(r, rows),
          streams[static_cast<size_t>(r)]);
    });
  }

  absl::Status Nccl(int64_t rows, int64_t i, absl::Span<const cuda::Stream> streams) {
    ISOBIT_RETURN_IF_NCCL_ERROR(ncclGroupStart());
    for (size_t r = 0; r < comms_.size(); ++r) {
      ISOBIT_RETURN_IF_NCCL_ERROR(ncclAllReduce(ranks_[r].narrow[i % 2].get(), ranks_[r].sum.get(),
                                                static_cast<size_t>(rows * kHidden), ncclBfloat16,
                                                ncclSum, comms_[r], streams[r].handle));
    }
    ISOBIT_RETURN_IF_NCCL_ERROR(ncclGroupEnd());
    return absl::OkStatus();
  }

  absl::Status NcclAndNorm(int64_t rows, int64_t i, absl::Span<const cuda::Stream> streams) {
    ISOBIT_RETURN_IF_ERROR(Nccl(rows, i, streams));
    return team_.Each([&](int r) {
      const auto i_of_rank = static_cast<size_t>(r);
      return cuda::LaunchRmsNormOfBf16Sum(
          Norm(r, rows), reinterpret_cast<const Bf16*>(ranks_[i_of_rank].sum.get()),
          streams[i_of_rank]);
    });
  }

  absl::Status Check() const {
    for (const auto& end : ends_) ISOBIT_RETURN_IF_ERROR(end->Check());
    return absl::OkStatus();
  }

 private:
  struct Rank {
    DeviceMemory partial[2], narrow[2], residual, sum, out, weight;
  };

  explicit Operands(RankTeam& team) : team_(team) {}
  RmsNormArgs Norm(int r, int64_t rows) const {
    const Rank& rank = ranks_[static_cast<size_t>(r)];
    return {.residual = reinterpret_cast<Bf16*>(rank.residual.get()),
            .weight = reinterpret_cast<const Bf16*>(rank.weight.get()),
            .out = reinterpret_cast<Bf16*>(rank.out.get()),
            .rows = rows,
            .hidden = kHidden,
            .eps = 1e-6f};
  }

  RankTeam& team_;
  std::vector<Rank> ranks_;
  std::vector<ncclComm_t> comms_;
  std::vector<std::unique_ptr<cuda::PeerAllReduce>> ends_;
};

std::string Describe(const cuda::AllReduceSchedule& s) {
  return absl::StrFormat("%s %dx%d", s.two_shots ? "two" : "one", s.cluster, s.threads);
}

absl::Status BenchGroup(int ranks, const std::vector<int64_t>& rows, nlohmann::json& report) {
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<RankTeam> team, RankTeam::Create(ranks));
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Operands> operands,
                          Operands::Create(*team, *std::ranges::max_element(rows)));
  absl::PrintF("\n%d ranks\n%6s %8s %-12s %9s %10s %9s %9s %10s %13s\n", ranks, "rows", "KB",
               "shots", "NCCL us", "+ norm us", "ours us", "no PDL us", "ours/NCCL",
               "ours/(+ norm)");
  for (const int64_t n : rows) {
    using Streams = absl::Span<const cuda::Stream>;
    const auto ours = [&](int64_t i, Streams s) { return operands->Ours(n, i, s); };
    const RankContender contenders[] = {
        {.dependent = true, .call = ours},
        {.dependent = false, .call = ours},
        {.call = [&](int64_t i, Streams s) { return operands->Nccl(n, i, s); }},
        {.call = [&](int64_t i, Streams s) { return operands->NcclAndNorm(n, i, s); }}};
    const bool large = n >= 1024;
    ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times, team->Race(contenders, large ? 10 : 20,
                                                              Quick() ? 5
                                                              : large ? 15
                                                                      : 31));
    ISOBIT_RETURN_IF_ERROR(operands->Check());
    const double us = Median(times[0]);
    const double nccl = Median(times[2]);
    const double both = Median(times[3]);
    const double target = TargetOf(ranks, n);
    const std::string shots = Describe(cuda::ChooseAllReduce(n, kHidden, ranks));
    absl::PrintF("%6d %8d %-12s %9.2f %10.2f %9.2f %9.2f %10.2f %13.2f%s\n", n, n * kHidden / 512,
                 shots, nccl, both, us, Median(times[1]), us / nccl, us / both,
                 target > 0 && us > target * nccl ? " !" : "");
    std::fflush(stdout);
    report["cases"].push_back({{"ranks", ranks},
                               {"rows", n},
                               {"hidden", kHidden},
                               {"schedule", shots},
                               {"us", us},
                               {"without_pdl_us", Median(times[1])},
                               {"nccl_us", nccl},
                               {"nccl_and_norm_us", both},
                               {"target", target}});
  }
  return BenchPush(*team, report);
}

}  // namespace

absl::Status BenchAllReduce() {
  // Without NVLink multicast, which isobit does not use. And kernels are loaded eagerly: loading
  // one would wait for a device on which another kernel waits for its peers.
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> groups,
                          Numbers("ranks", absl::GetFlag(FLAGS_ranks), 8));
  ISOBIT_ASSIGN_OR_RETURN(std::vector<int64_t> rows,
                          Numbers("rows", absl::GetFlag(FLAGS_rows), 1 << 20));
  constexpr int64_t kQuick[] = {1, 16, 64, 256, 1024};
  if (Quick()) {
    std::erase_if(rows, [&](int64_t n) { return std::ranges::count(kQuick, n) == 0; });
  }
  if (rows.empty()) return absl::InvalidArgumentError("--rows: nothing to measure");
  ISOBIT_ASSIGN_OR_RETURN(const cuda::DeviceInfo device, cuda::GetDeviceInfo(0));
  int count = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetDeviceCount(&count));
  int nccl = 0;
  ISOBIT_RETURN_IF_NCCL_ERROR(ncclGetVersion(&nccl));

  const std::string machine =
      absl::StrFormat("%d x %s, NCCL %d.%d.%d without NVLink multicast", count, device.name,
                      nccl / 10000, nccl / 100 % 100, nccl % 100);
  absl::PrintF(
      "%s\nAll-reduce of rows of %d columns: ours of fp32 partials, with the residual's update and "
      "RMSNorm;\nNCCL's of bf16, alone and with our norm kernel after it. Graph replay, median, "
      "slowest rank.\n",
      machine, kHidden);
  nlohmann::json report = {{"machine", machine}};
  for (const int64_t ranks : groups) {
    if (ranks > count) {
      absl::PrintF("\n%d ranks: left out, this machine has %d GPUs\n", ranks, count);
      continue;
    }
    ISOBIT_RETURN_IF_ERROR(BenchGroup(static_cast<int>(ranks), rows, report));
  }
  return WriteReport(report);
}

}  // namespace isobit::bench
