// The flags of isobit-scorer. See scorer_settings.h.
#include "trainer_bridge/scorer/scorer_settings.h"

#include <cstdlib>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/rpc/channel_flags.h"
#include "common/rpc/server_flags.h"
#include "kernels/cpu/cpu_ops.h"

ABSL_FLAG(std::string, model_root, "",
          "Directory below which all models lie; no path leaves it. Required.");
ABSL_FLAG(std::string, model, "",
          "Model directory to load first, relative to --model_root. Required.");
ABSL_FLAG(std::string, load_format, "auto",
          "auto: weights from safetensors; dummy: random ones for config.json, from a seed.");
ABSL_FLAG(std::vector<std::string>, ignore_config_fields, {},
          "Fields of config.json, such as auto_map,rope_scaling.beta, that may be there although "
          "isobit does not honour them. Those that are found are logged.");
ABSL_FLAG(
    bool, round_fp16_weights, false,
    "Take fp16 weights and round them to bf16, which costs precision that an fp16 engine has.");
ABSL_FLAG(int, shards, 2,
          "Ranks of this process, each of which holds an equal part of every layer; 1 to 64 in all "
          "processes.");
ABSL_FLAG(std::optional<int>, world_size, std::nullopt,
          "Processes whose shards are one scorer (--backend=cuda); if not given, what torchrun or "
          "LeaderWorkerSet put into the environment, else 1.");
ABSL_FLAG(
    std::optional<int>, rank, std::nullopt,
    "This process's, from 0. Rank 0 serves; the others work for it and report their health at "
    "ports of their own: of a host's processes under torchrun, those after the first take a "
    "free port for --port and add .1, .2, ... to --port_file. As --world_size.");
ABSL_FLAG(std::string, master_addr, "", "Where rank 0 is reached by the others. As --world_size.");
ABSL_FLAG(std::optional<int>, master_port, std::nullopt,
          "Of rank 0, for the others; if not given, as --world_size, else 29500.");
ABSL_FLAG(std::string, group_token_file, "",
          "File with a secret that all processes of a group have: rank 0 refuses a process that "
          "does not show it.");
ABSL_FLAG(std::string, backend, "cpu", "cpu, or cuda: one GPU (H100, H200) for each shard.");
ABSL_FLAG(
    std::vector<std::string>, devices, {},
    "CUDA devices of the shards, such as 0,1,2,3; empty: 0, 1, ..., for a process that torchrun "
    "calls LOCAL_RANK 1 the ones after these, and so on (--backend=cuda).");
ABSL_FLAG(int, gather_timeout_seconds, 120,
          "How long a rank or process waits for another one until the service fails "
          "(--backend=cuda).");
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
          "Tokens that one rank takes into one pass, and has memory for from the start; a longer "
          "sequence runs alone. If not given, 2048 on a CPU and 16384 on a GPU.");
ABSL_FLAG(int64_t, max_sequences, 1024, "Sequences in one Score request.");
ABSL_FLAG(int64_t, max_queued_sequences, 16384,
          "Sequences of all requests in flight; beyond, requests are refused with a retry hint.");
ABSL_FLAG(
    int64_t, max_calls_mb, 1024,
    "Memory of Score calls, in MiB: of sequences that wait or run, and of results that clients "
    "have not read; more are refused with RESOURCE_EXHAUSTED.");
ABSL_FLAG(double, max_client_share, 0.5, "Part of --max_calls_mb that one client may take.");
ABSL_FLAG(int, max_logprobs, 64, "The largest SamplingParams.logprobs accepted, 0 to 1024.");

namespace isobit::scorer {
namespace {

constexpr int64_t kMany = int64_t{1} << 24;

absl::StatusOr<CpuOptions> CpuOptionsFromFlags() {
  CpuOptions options;
  options.num_threads = absl::GetFlag(FLAGS_threads_per_shard);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("threads_per_shard", options.num_threads, 1, 256));
  ISOBIT_ASSIGN_OR_RETURN(options.isa, cpu::ChooseIsa(absl::GetFlag(FLAGS_isa)));
  return options;
}

// Of the flag --devices: one for each shard, none twice.
absl::StatusOr<std::vector<int>> DevicesFromFlags(int num_shards, int local_rank) {
  ISOBIT_ASSIGN_OR_RETURN(std::vector<int> devices, ParseDevices(absl::GetFlag(FLAGS_devices)));
  if (devices.empty()) {
    devices.resize(static_cast<size_t>(num_shards));
    std::iota(devices.begin(), devices.end(), local_rank * num_shards);
  }
  const std::set<int> different(devices.begin(), devices.end());
  if (different.size() != devices.size() || devices.size() != static_cast<size_t>(num_shards)) {
    return absl::InvalidArgumentError(absl::StrCat("--devices names ", different.size(),
                                                   " different ones in ", devices.size(),
                                                   ", expected ", num_shards, ", one a shard"));
  }
  return devices;
}

// torchrun starts all processes of a host by one command line: those after the first take a port of
// the system's choice, and a file of their own for it.
absl::StatusOr<ServerOptions> ServerOptionsOfProcess(int local_rank) {
  ISOBIT_ASSIGN_OR_RETURN(ServerOptions options, ServerOptionsFromFlags());
  if (local_rank == 0) return options;
  options.port = 0;
  if (options.admin_port) options.admin_port = 0;
  if (!options.port_file.empty()) absl::StrAppend(&options.port_file, ".", local_rank);
  return options;
}

// How the processes of a group know each other.
absl::Status ReadGroupSecurity(Settings& settings) {
  ISOBIT_ASSIGN_OR_RETURN(settings.upstream, ChannelSecurityFromFlags());
  if (const std::string file = absl::GetFlag(FLAGS_group_token_file); !file.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(settings.group_token, ReadToken("--group_token_file", file));
  }
  const ProcessPlace& place = settings.place;
  if (place.world_size == 1 || place.rank > 0 || IsLoopback(place.master_addr) ||
      settings.server.security.is_tls) {
    return absl::OkStatus();
  }
  if (!settings.group_token.empty() || settings.server.security.is_insecure) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "other hosts can connect to --master_addr=", place.master_addr,
      ": expected --tls_cert and --tls_key, --group_token_file, or --insecure for a group that "
      "anybody may join"));
}

// Where the ranks compute, and what depends on it.
absl::Status ReadBackend(Settings& settings) {
  ScorerOptions& scorer = settings.scorer;
  const std::string backend = absl::GetFlag(FLAGS_backend);
  ISOBIT_RETURN_IF_ERROR(CpuOptionsFromFlags().status());
  ISOBIT_ASSIGN_OR_RETURN(std::vector<int> devices,
                          DevicesFromFlags(scorer.local_shards, settings.place.local_rank));
  const int seconds = absl::GetFlag(FLAGS_gather_timeout_seconds);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("gather_timeout_seconds", seconds, 1, 86400));
  settings.timeout = std::chrono::seconds(seconds);
  if (backend == "cpu") {
    if (settings.place.world_size > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--backend=cpu serves from one process, not from ",
                       settings.place.world_size, ": ranks of several need GPUs and NCCL"));
    }
  } else if (backend == "cuda") {
    settings.devices = std::move(devices);
    scorer.max_batch_tokens = 16384;
    scorer.chunk_rows = 1024;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--backend is \"", backend, "\", expected cpu or cuda"));
  }
  scorer.max_batch_tokens = absl::GetFlag(FLAGS_max_batch_tokens).value_or(scorer.max_batch_tokens);
  return RequireInRange("max_batch_tokens", scorer.max_batch_tokens, int64_t{1}, kMany);
}

}  // namespace

absl::StatusOr<Settings> SettingsFromFlags() {
  Settings settings;
  ScorerOptions& scorer = settings.scorer;
  scorer.model_root = absl::GetFlag(FLAGS_model_root);
  settings.model = absl::GetFlag(FLAGS_model);
  if (scorer.model_root.empty()) return absl::InvalidArgumentError("--model_root is required");
  if (settings.model.empty()) return absl::InvalidArgumentError("--model is required");
  ISOBIT_ASSIGN_OR_RETURN(scorer.load_format, ParseLoadFormat(absl::GetFlag(FLAGS_load_format)));
  scorer.load_policy = {.ignored_fields = absl::GetFlag(FLAGS_ignore_config_fields),
                        .round_fp16 = absl::GetFlag(FLAGS_round_fp16_weights)};
  ISOBIT_ASSIGN_OR_RETURN(settings.place,
                          PlaceOfProcess({.rank = absl::GetFlag(FLAGS_rank),
                                          .world_size = absl::GetFlag(FLAGS_world_size),
                                          .master_addr = absl::GetFlag(FLAGS_master_addr),
                                          .master_port = absl::GetFlag(FLAGS_master_port)},
                                         [](const char* name) { return std::getenv(name); }));
  ISOBIT_ASSIGN_OR_RETURN(settings.server, ServerOptionsOfProcess(settings.place.local_rank));
  scorer.local_shards = absl::GetFlag(FLAGS_shards);
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("shards", scorer.local_shards, 1, kMaxShards / settings.place.world_size));
  scorer.num_shards = scorer.local_shards * settings.place.world_size;
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
  ISOBIT_ASSIGN_OR_RETURN(settings.service.memory,
                          ByteLimitsOf("max_calls_mb", absl::GetFlag(FLAGS_max_calls_mb),
                                       absl::GetFlag(FLAGS_max_client_share)));
  settings.service.max_logprobs = static_cast<uint32_t>(max_logprobs);
  ISOBIT_RETURN_IF_ERROR(ReadGroupSecurity(settings));
  ISOBIT_RETURN_IF_ERROR(ReadBackend(settings));
  return settings;
}

absl::StatusOr<RankBackend> MakeBackend(const Settings& settings, const std::string& nccl_id) {
  if (!settings.devices.empty()) {
    return MakeCudaBackend({.numerics = settings.scorer.numerics,
                            .devices = settings.devices,
                            .num_shards = settings.scorer.num_shards,
                            .first_rank = settings.place.rank * settings.scorer.local_shards,
                            .nccl_id = nccl_id,
                            .timeout = settings.timeout});
  }
  ISOBIT_ASSIGN_OR_RETURN(const CpuOptions cpu, CpuOptionsFromFlags());
  RankBackend backend;
  backend.make_ops = [cpu](int) { return MakeCpuOps(cpu); };
  return backend;
}

}  // namespace isobit::scorer
