// The flags of isobit-scorer. See scorer_settings.h.
#include "trainer_bridge/scorer/scorer_settings.h"

#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/rpc/calls_memory_flag.h"
#include "common/rpc/channel_flags.h"
#include "common/rpc/server_flags.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/runtime/cuda_backend.h"

ABSL_FLAG(int, shards, 2,
          "Ranks of this process, each of which holds an equal part of every layer; 1 to 64 in all "
          "processes.");
ABSL_FLAG(
    std::optional<int>, world_size, std::nullopt,
    "Processes of one scorer (--backend=cuda). If not given: from the environment of torchrun "
    "or LeaderWorkerSet, else 1.");
ABSL_FLAG(
    std::optional<int>, rank, std::nullopt,
    "This process's rank, from 0. Rank 0 serves; the others work for it and serve only their "
    "health, each at its own port. Under torchrun, all processes of a host but the first take a "
    "free port and add .1, .2, ... to --port_file. If not given: from the environment, as "
    "--world_size.");
ABSL_FLAG(std::string, master_addr, "",
          "Address at which the other processes reach rank 0. If not given: from the environment, "
          "as --world_size.");
ABSL_FLAG(std::optional<int>, master_port, std::nullopt,
          "Port at which the other processes reach rank 0. If not given: from the environment, as "
          "--world_size, else 29500.");
ABSL_FLAG(std::string, group_token_file, "",
          "File with the group secret, the same for all processes of a group: rank 0 refuses a "
          "process that does not show it.");
ABSL_FLAG(int, gather_timeout_seconds, 120,
          "How long a rank or process waits for another before the service fails "
          "(--backend=cuda).");
ABSL_FLAG(int64_t, max_sequences, 1024, "Sequences in one Score request.");
ABSL_FLAG(int64_t, max_queued_sequences, 16384,
          "Sequences of all requests in flight; further requests are refused with a retry hint.");
ABSL_FLAG(int, max_logprobs, 64, "The largest SamplingParams.logprobs accepted, 0 to 1024.");

namespace isobit {
namespace {

constexpr int64_t kMany = int64_t{1} << 24;

// torchrun starts all processes of a host with the same flags, so those after the first take a free
// port and a port file of their own.
absl::StatusOr<ServerOptions> ServerOptionsOfProcess(int local_rank) {
  ISOBIT_ASSIGN_OR_RETURN(ServerOptions options, ServerOptionsFromFlags());
  if (local_rank == 0) return options;
  options.port = 0;
  if (options.admin_port) options.admin_port = 0;
  if (!options.port_file.empty()) absl::StrAppend(&options.port_file, ".", local_rank);
  return options;
}

// How the processes of a group authenticate each other.
absl::Status ReadGroupSecurity(ScorerSettings& settings) {
  ISOBIT_ASSIGN_OR_RETURN(settings.upstream, ChannelSecurityFromFlags());
  if (const std::string file = absl::GetFlag(FLAGS_group_token_file); !file.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(settings.group_secret, ReadToken("--group_token_file", file));
  }
  const ProcessPlace& place = settings.place;
  if (place.world_size == 1 || place.rank > 0 || IsLoopback(place.master_addr) ||
      settings.server.security.is_tls) {
    return absl::OkStatus();
  }
  if (!settings.group_secret.empty() || settings.server.security.is_insecure) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "other hosts can connect to --master_addr=", place.master_addr,
      ": expected --tls_cert and --tls_key, --group_token_file, or --insecure for a group that "
      "anybody may join"));
}

// The backend, and the options that depend on it.
absl::Status ReadBackend(ScorerSettings& settings, std::optional<int64_t> max_batch_tokens) {
  ScorerOptions& scorer = settings.scorer;
  const ProcessPlace& place = settings.place;
  ISOBIT_ASSIGN_OR_RETURN(
      settings.backend,
      BackendSettingsFromFlags(scorer.local_shards, place.local_rank * scorer.local_shards));
  const int seconds = absl::GetFlag(FLAGS_gather_timeout_seconds);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("gather_timeout_seconds", seconds, 1, 86400));
  settings.timeout = std::chrono::seconds(seconds);
  const bool is_cpu = settings.backend.backend == BackendKind::kCpu;
  if (is_cpu && place.world_size > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--backend=cpu serves from one process, not from ", place.world_size,
                     ": several processes need GPUs and NCCL"));
  }
  scorer.max_batch_tokens = max_batch_tokens.value_or(is_cpu ? 2048 : 16384);
  scorer.chunk_rows = is_cpu ? 64 : 1024;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ScorerSettings> ScorerSettingsFromFlags() {
  ScorerSettings settings;
  ScorerOptions& scorer = settings.scorer;
  ISOBIT_ASSIGN_OR_RETURN(ModelSettings model, ModelSettingsFromFlags());
  settings.model = std::move(model.name);
  scorer.model_root = std::move(model.root);
  scorer.load_format = model.load_format;
  scorer.load_policy = std::move(model.load_policy);
  scorer.numerics = model.numerics;
  scorer.max_context = model.max_context;
  scorer.prefix_sharing = model.prefix_sharing;
  settings.service.weight_stream = model.weight_stream;
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
  const int64_t max_sequences = absl::GetFlag(FLAGS_max_sequences);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_sequences", max_sequences, int64_t{1}, kMany));
  const int64_t max_queued = absl::GetFlag(FLAGS_max_queued_sequences);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_queued_sequences", max_queued, max_sequences, kMany));
  const int max_logprobs = absl::GetFlag(FLAGS_max_logprobs);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_logprobs", max_logprobs, 0, 1024));
  scorer.max_queued_sequences = static_cast<size_t>(max_queued);
  settings.service.max_sequences = static_cast<size_t>(max_sequences);
  ISOBIT_ASSIGN_OR_RETURN(settings.service.memory, CallsMemoryFromFlags());
  settings.service.max_logprobs = static_cast<uint32_t>(max_logprobs);
  ISOBIT_RETURN_IF_ERROR(ReadGroupSecurity(settings));
  ISOBIT_RETURN_IF_ERROR(ReadBackend(settings, model.max_batch_tokens));
  return settings;
}

absl::StatusOr<RankBackend> MakeScorerBackend(const ScorerSettings& settings,
                                              const std::string& nccl_id) {
  if (settings.backend.backend == BackendKind::kCuda) {
    return MakeCudaBackend({.numerics = settings.scorer.numerics,
                            .devices = settings.backend.devices,
                            .num_shards = settings.scorer.num_shards,
                            .first_rank = settings.place.rank * settings.scorer.local_shards,
                            .nccl_id = nccl_id,
                            .timeout = settings.timeout});
  }
  CpuOptions cpu = settings.backend.cpu;
  cpu.mode = settings.scorer.numerics;
  RankBackend backend;
  backend.make_ops = [cpu](int) { return MakeCpuBackend(cpu); };
  return backend;
}

}  // namespace isobit
