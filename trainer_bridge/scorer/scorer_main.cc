// The scorer process: isobit-scorer.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/rpc/server_flags.h"
#include "common/rpc/server_runner.h"
#include "kernels/cpu/cpu_ops.h"
#include "trainer_bridge/scorer/rank_backend.h"
#include "trainer_bridge/scorer/scorer.h"
#include "trainer_bridge/scorer/scorer_service.h"

ABSL_FLAG(std::string, model_root, "",
          "Directory below which all models lie; no path leaves it. Required.");
ABSL_FLAG(std::string, model, "",
          "Model directory to load first, relative to --model_root. Required.");
ABSL_FLAG(std::string, load_format, "auto",
          "auto: weights from safetensors; dummy: random ones for config.json, from a seed.");
ABSL_FLAG(int, shards, 2, "Ranks that each hold an equal part of every layer, 1 to 64.");
ABSL_FLAG(std::string, backend, "cpu", "cpu, or cuda: one GPU (H100, H200) for each shard.");
ABSL_FLAG(std::vector<std::string>, devices, {},
          "CUDA devices of the shards, such as 0,1,2,3; empty: 0, 1, ... (--backend=cuda).");
ABSL_FLAG(int, gather_timeout_seconds, 120,
          "How long a rank waits for another one until the service fails (--backend=cuda).");
ABSL_FLAG(int, threads_per_shard, 1,
          "Threads that compute for one rank, 1 to 256 (--backend=cpu).");
ABSL_FLAG(std::string, numerics, "tree", "tree, batch_invariant or vanilla.");
ABSL_FLAG(std::string, isa, "auto",
          "auto, avx512, avx2 or portable: it changes speed, never a bit (--backend=cpu).");
ABSL_FLAG(
    int64_t, max_context, 0,
    "Tokens of one sequence, prompt and completion together; 0: as many positions as the model "
    "has.");
ABSL_FLAG(std::optional<int64_t>, max_batch_tokens, std::nullopt,
          "Tokens that one rank takes into one pass; a longer sequence runs alone. If not given, "
          "2048 on a CPU and 16384 on a GPU.");
ABSL_FLAG(int64_t, max_sequences, 1024, "Sequences in one Score request.");
ABSL_FLAG(int64_t, max_queued_sequences, 16384,
          "Sequences of all requests in flight; beyond, requests are refused with a retry hint.");
ABSL_FLAG(int, max_logprobs, 64, "The largest SamplingParams.logprobs accepted, 0 to 1024.");

namespace isobit::scorer {
namespace {

constexpr char kUsage[] =
    "isobit-scorer: logprobs of given tokens at tensor-parallel size 1, on FSDP-style shards.\n\n"
    "  isobit-scorer --model_root=DIR --model=NAME [--port=N] [--shards=N] [--numerics=MODE]";

// What the flags say, checked.
struct Settings {
  std::string model;
  ScorerOptions scorer;
  ScorerService::Options service;
};

absl::StatusOr<CpuOptions> CpuOptionsFromFlags() {
  CpuOptions options;
  const std::string isa = absl::GetFlag(FLAGS_isa);
  options.num_threads = absl::GetFlag(FLAGS_threads_per_shard);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("threads_per_shard", options.num_threads, 1, 256));
  if (isa == "auto") return options;
  const std::optional<cpu::Isa> parsed = cpu::ParseIsa(isa);
  if (!parsed) {
    return absl::InvalidArgumentError(
        absl::StrCat("--isa is \"", isa, "\", expected auto, avx512, avx2 or portable"));
  }
  if (*parsed > cpu::DetectIsa()) {
    return absl::InvalidArgumentError(absl::StrCat("--isa is ", isa,
                                                   ", but this machine runs at most ",
                                                   std::string(cpu::IsaName(cpu::DetectIsa()))));
  }
  options.isa = *parsed;
  return options;
}

// Of the flag --devices: one for each shard, none twice.
absl::StatusOr<std::vector<int>> DevicesFromFlags(int num_shards) {
  std::vector<int> devices;
  const std::vector<std::string> names = absl::GetFlag(FLAGS_devices);
  if (names.empty()) {
    for (int shard = 0; shard < num_shards; ++shard) devices.push_back(shard);
    return devices;
  }
  for (const std::string& name : names) {
    int device = 0;
    if (!absl::SimpleAtoi(name, &device) || device < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--devices names \"", name, "\", expected numbers such as 0,1,2,3"));
    }
    devices.push_back(device);
  }
  const std::set<int> different(devices.begin(), devices.end());
  if (different.size() != devices.size() || devices.size() != static_cast<size_t>(num_shards)) {
    return absl::InvalidArgumentError(absl::StrCat("--devices names ", different.size(),
                                                   " different ones in ", devices.size(),
                                                   ", expected ", num_shards, ", one a shard"));
  }
  return devices;
}

// Fills in what depends on where the ranks compute.
absl::Status SetBackend(ScorerOptions& scorer) {
  constexpr int64_t kMany = int64_t{1} << 24;
  const std::string backend = absl::GetFlag(FLAGS_backend);
  ISOBIT_ASSIGN_OR_RETURN(const CpuOptions cpu, CpuOptionsFromFlags());
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int> devices, DevicesFromFlags(scorer.num_shards));
  const int timeout = absl::GetFlag(FLAGS_gather_timeout_seconds);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("gather_timeout_seconds", timeout, 1, 86400));
  RankBackend ranks;
  if (backend == "cpu") {
    ranks.make_ops = [cpu](int) { return MakeCpuOps(cpu); };
  } else if (backend == "cuda") {
    ISOBIT_ASSIGN_OR_RETURN(ranks, MakeCudaBackend({.numerics = scorer.numerics,
                                                    .devices = devices,
                                                    .num_shards = scorer.num_shards,
                                                    .timeout = std::chrono::seconds(timeout)}));
    scorer.max_batch_tokens = 16384;
    scorer.chunk_rows = 1024;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--backend is \"", backend, "\", expected cpu or cuda"));
  }
  scorer.make_ops = std::move(ranks.make_ops);
  scorer.make_gather = std::move(ranks.make_gather);
  scorer.max_batch_tokens = absl::GetFlag(FLAGS_max_batch_tokens).value_or(scorer.max_batch_tokens);
  return RequireInRange("max_batch_tokens", scorer.max_batch_tokens, int64_t{1}, kMany);
}

absl::StatusOr<Settings> SettingsFromFlags() {
  constexpr int64_t kMany = int64_t{1} << 24;
  Settings settings;
  ScorerOptions& scorer = settings.scorer;
  scorer.model_root = absl::GetFlag(FLAGS_model_root);
  settings.model = absl::GetFlag(FLAGS_model);
  if (scorer.model_root.empty()) return absl::InvalidArgumentError("--model_root is required");
  if (settings.model.empty()) return absl::InvalidArgumentError("--model is required");
  ISOBIT_ASSIGN_OR_RETURN(scorer.load_format, ParseLoadFormat(absl::GetFlag(FLAGS_load_format)));
  scorer.num_shards = absl::GetFlag(FLAGS_shards);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("shards", scorer.num_shards, 1, 64));
  ISOBIT_ASSIGN_OR_RETURN(scorer.numerics, ParseNumericsMode(absl::GetFlag(FLAGS_numerics)));
  scorer.max_context = absl::GetFlag(FLAGS_max_context);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_context", scorer.max_context, int64_t{0}, kMany));
  const int64_t max_sequences = absl::GetFlag(FLAGS_max_sequences);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_sequences", max_sequences, int64_t{1}, kMany));
  const int64_t max_queued = absl::GetFlag(FLAGS_max_queued_sequences);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_queued_sequences", max_queued, max_sequences, kMany));
  const int max_logprobs = absl::GetFlag(FLAGS_max_logprobs);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_logprobs", max_logprobs, 0, 1024));
  scorer.max_queued_sequences = static_cast<size_t>(max_queued);
  settings.service.max_sequences = static_cast<size_t>(max_sequences);
  settings.service.max_logprobs = static_cast<uint32_t>(max_logprobs);
  ISOBIT_RETURN_IF_ERROR(SetBackend(scorer));
  return settings;
}

int Run(Settings settings) {
  ScorerService service(settings.service);
  ServerRunner runner(ServerOptionsFromFlags());
  runner.Register(&service, v1::ScorerService::service_full_name());
  if (const absl::Status started = runner.Start(); !started.ok()) {
    ISOBIT_LOG(Error) << started.ToString();
    return 1;
  }
  settings.scorer.on_fault = [&runner](const absl::Status& fault) { runner.Fail(fault); };
  ISOBIT_LOG(Info) << "loading " << settings.model;
  absl::StatusOr<std::unique_ptr<Scorer>> scorer =
      Scorer::Load(std::move(settings.scorer), settings.model);
  if (!scorer.ok()) {
    ISOBIT_LOG(Error) << "cannot load " << settings.model << ": " << scorer.status().ToString();
    return 1;
  }
  ISOBIT_LOG(Info) << "serving version 1, digest " << (*scorer)->version().digest << ", on "
                   << (*scorer)->options().num_shards << " shards of " << (*scorer)->shard_bytes()
                   << " bytes, " << (*scorer)->ops_name();
  service.SetScorer(*std::move(scorer));
  runner.SetServing(true);
  const int exit_code = runner.Wait([&service] { service.BeginDrain(); });
  if (exit_code != 0) {
    // A device that failed, or waits for a rank that has gone, may never end what the destructors
    // wait for. All calls have been answered.
    std::fflush(nullptr);
    std::_Exit(exit_code);
  }
  service.Stop();  // while there is still a runner to report a fault to
  return exit_code;
}

}  // namespace
}  // namespace isobit::scorer

int main(int argc, char** argv) {
  isobit::ServerRunner::BlockStopSignals();  // before gRPC starts threads
  isobit::ParseFlagsOrExit(argc, argv, isobit::scorer::kUsage);
  absl::StatusOr<isobit::scorer::Settings> settings = isobit::scorer::SettingsFromFlags();
  if (!settings.ok()) {
    absl::FPrintF(stderr, "%s: %s\nTry --help.\n", argv[0], settings.status().message());
    return 2;
  }
  return isobit::scorer::Run(*std::move(settings));
}
