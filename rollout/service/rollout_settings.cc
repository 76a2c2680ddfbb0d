// The flags of isobit-rollout. See rollout_settings.h.
#include "rollout/service/rollout_settings.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "common/base/rank_count.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/rpc/server_flags.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/model/model_plan.h"
#include "kernels/runtime/cuda_backend.h"
#include "kernels/runtime/host_executor.h"
#include "rollout/guesses/drafters.h"
#include "rollout/guesses/fast_path/fast_path.h"
#include "rollout/service/default_limits.h"

ABSL_FLAG(int, tp_size, 4,
          absl::StrCat("Tensor-parallel ranks, one thread each: ", isobit::kRankCounts, "."));
ABSL_FLAG(double, gpu_memory_fraction, 0.9,
          "Fraction of each GPU's free memory that the engine may take (--backend=cuda).");
ABSL_FLAG(bool, cuda_graphs, true,
          "Replay CUDA graphs for decode steps of up to 512 sequences. Changes speed, never a bit "
          "(--backend=cuda).");
ABSL_FLAG(bool, shared_prefix_attention, true,
          "Decode attention reads a prefix once for all sequences that share its pages. Changes "
          "speed, never a bit (--backend=cuda).");
ABSL_FLAG(bool, peer_memory, true,
          "Ranks exchange data through each other's mapped GPU memory; false: by NCCL. Changes "
          "speed, never a bit (--backend=cuda).");
ABSL_FLAG(int64_t, peer_timeout_ms, 2000,
          "How long a rank's GPU waits for another rank before the service fails "
          "(--backend=cuda).");
ABSL_FLAG(int, page_size, 16,
          "Tokens in a KV page. Prompts share whole pages, so smaller ones share more.");
ABSL_FLAG(int, num_pages, 0,
          "KV pages; 0: as many as --kv_cache_mb or --gpu_memory_fraction allows.");
ABSL_FLAG(int64_t, kv_cache_mb, 1024,
          "Memory for keys and values of all ranks, in MiB (--backend=cpu).");
ABSL_FLAG(double, prefix_cache_fraction, 1.0,
          "Fraction of the KV pages that may keep prefixes which nobody uses, until somebody needs "
          "the pages (--prefix_sharing).");
ABSL_FLAG(
    std::string, speculation, "off",
    "Who guesses next tokens, so that a step may give a sequence several: off, or history and "
    "lookup, separated by commas; the first that has a guess is taken. Or fast_path alone: tokens "
    "are drawn with numerics that promise no bits, and verified in windows. Changes speed, never a "
    "bit, except for requests that ask for no determinism.");
ABSL_FLAG(int, speculation_max_tokens, 8,
          "The most tokens that are guessed for a sequence in a step (--speculation).");
ABSL_FLAG(int64_t, speculation_history_mb, 64,
          "Memory for texts that the drafter history keeps, in MiB.");
ABSL_FLAG(
    int, verify_window, 16,
    "Rows of a sequence that are verified together: its last token and what the fast path has "
    "drawn behind it, 2 to 1024 (--speculation=fast_path).");
ABSL_FLAG(int, verify_group, 0,
          "Sequences that are verified together; 0: as many as a step has room for, at most 32 "
          "(--speculation=fast_path).");
ABSL_FLAG(bool, refuse_while_asleep, false,
          "Refuse requests with UNAVAILABLE from Sleep to WakeUp; otherwise they wait.");
ABSL_FLAG(int, max_running, 0,
          "Sequences in one step; 0: 64 on CPUs, on GPUs up to 512 as memory allows.");
ABSL_FLAG(int, max_waiting, 1024, "Requests that may queue.");
ABSL_FLAG(int64_t, max_waiting_tokens, 4 << 20, "Prompt tokens that may queue.");
ABSL_FLAG(int64_t, max_requests_mb, 256,
          "Memory of requests that wait or run, in MiB. A request that would exceed it is refused "
          "with RESOURCE_EXHAUSTED.");
ABSL_FLAG(int64_t, max_unread_mb, 1024,
          "Memory of results that clients have not read, and of their calls, in MiB. A stream that "
          "would exceed it ends with RESOURCE_EXHAUSTED.");
ABSL_FLAG(bool, vllm_face, false,
          "Serve vllm.grpc.engine.VllmEngine beside isobit.v1, for routers made for vLLM.");
ABSL_FLAG(std::string, vllm_tokenizer, "",
          "Where routers find the model's tokenizer, in their own file system or by a hub's name; "
          "empty: in the model's directory, by its path here (--vllm_face).");

namespace isobit {
namespace {

constexpr int kCpuRunning = 64;
constexpr int64_t kCpuBatchTokens = 8192;

absl::Status ReadMemory(RolloutSettings& settings) {
  constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();
  ModelRunnerOptions& runner = settings.engine.runner;
  runner.page_size = absl::GetFlag(FLAGS_page_size);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("page_size", runner.page_size, 1, 1 << 20));
  runner.num_pages = absl::GetFlag(FLAGS_num_pages);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("num_pages", runner.num_pages, 0, kMaxInt));
  const int64_t mib = absl::GetFlag(FLAGS_kv_cache_mb);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("kv_cache_mb", mib, 1, 1 << 30));
  settings.kv_cache_bytes = mib << 20;
  return absl::OkStatus();
}

// How many requests may run and wait. `batch_tokens`: the flag's value, if it is given. FitToModel
// sets the limits that are 0.
absl::Status ReadQueue(std::optional<int64_t> batch_tokens, EngineOptions& engine) {
  // The bound of a CUDA grid's y dimension (step_kernels.h).
  const int max_running = absl::GetFlag(FLAGS_max_running);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_running", max_running, 0, 65535));
  const int64_t max_batch_tokens = batch_tokens.value_or(0);
  if (batch_tokens) {
    ISOBIT_RETURN_IF_ERROR(
        RequireInRange("max_batch_tokens", max_batch_tokens, std::max(max_running, 1), 1 << 24));
  }
  const double fraction = absl::GetFlag(FLAGS_prefix_cache_fraction);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("prefix_cache_fraction", fraction, 0.0, 1.0));
  engine.prefix_cache_fraction = fraction;
  engine.refuse_while_asleep = absl::GetFlag(FLAGS_refuse_while_asleep);
  const int max_waiting = absl::GetFlag(FLAGS_max_waiting);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_waiting", max_waiting, 1, 1 << 24));
  engine.max_waiting_tokens = absl::GetFlag(FLAGS_max_waiting_tokens);
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("max_waiting_tokens", engine.max_waiting_tokens, 1, int64_t{1} << 40));
  engine.scheduler.max_running = static_cast<size_t>(max_running);
  engine.scheduler.max_batch_tokens = max_batch_tokens;
  engine.max_waiting_requests = static_cast<size_t>(max_waiting);
  return absl::OkStatus();
}

absl::Status ReadSpeculation(RolloutSettings& settings) {
  SpeculationOptions& speculation = settings.speculation;
  const int most = absl::GetFlag(FLAGS_speculation_max_tokens);
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("speculation_max_tokens", most, 1, static_cast<int>(kMaxGuesses)));
  speculation.max_guesses = static_cast<size_t>(most);
  const int64_t mib = absl::GetFlag(FLAGS_speculation_history_mb);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("speculation_history_mb", mib, 1, 1 << 20));
  const int window = absl::GetFlag(FLAGS_verify_window);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("verify_window", window, 2, 1024));
  const int group = absl::GetFlag(FLAGS_verify_group);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("verify_group", group, 0, 1024));
  const std::string who = absl::GetFlag(FLAGS_speculation);
  if (who == "fast_path") {
    if (settings.engine.runner.mode != NumericsMode::kTree) {
      return absl::InvalidArgumentError(
          absl::StrCat("--speculation=fast_path verifies by tree, but "
                       "--numerics is ",
                       NumericsModeName(settings.engine.runner.mode)));
    }
    settings.cuda.variant = true;
    settings.engine.make_guesser = FastPath::Maker(
        {.window = static_cast<size_t>(window), .group = static_cast<size_t>(group)});
    return absl::OkStatus();
  }
  ISOBIT_ASSIGN_OR_RETURN(speculation.make_drafters,
                          DraftersOf(who, {.history_bytes = static_cast<size_t>(mib) << 20}));
  return absl::OkStatus();
}

absl::StatusOr<StreamLimits> StreamLimitsFromFlags() {
  StreamLimits limits;
  ISOBIT_ASSIGN_OR_RETURN(
      limits.requests,
      ByteLimitsFromFlags("max_requests_mb", absl::GetFlag(FLAGS_max_requests_mb)));
  ISOBIT_ASSIGN_OR_RETURN(limits.results,
                          ByteLimitsFromFlags("max_unread_mb", absl::GetFlag(FLAGS_max_unread_mb)));
  return limits;
}

absl::StatusOr<CudaRankOptions> CudaOptionsFromFlags() {
  CudaRankOptions options;
  options.peer_memory = absl::GetFlag(FLAGS_peer_memory);
  options.use_graphs = absl::GetFlag(FLAGS_cuda_graphs);
  if (!absl::GetFlag(FLAGS_shared_prefix_attention)) options.sharing = cuda::Sharing::kNever;
  options.memory_fraction = absl::GetFlag(FLAGS_gpu_memory_fraction);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("gpu_memory_fraction", options.memory_fraction, 0.01, 1.0));
  const int64_t timeout = absl::GetFlag(FLAGS_peer_timeout_ms);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("peer_timeout_ms", timeout, 1, 60'000));
  options.peer_timeout = absl::Milliseconds(timeout);
  return options;
}

// Sets the limits for which no flag was given.
absl::Status ChooseLimits(const RolloutSettings& settings, const ModelConfig& config,
                          SchedulerLimits& limits) {
  DefaultLimits defaults = {.max_running = kCpuRunning, .max_batch_tokens = kCpuBatchTokens};
  if (settings.backend.backend == BackendKind::kCuda) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const int device : settings.backend.devices) {
      ISOBIT_ASSIGN_OR_RETURN(const int64_t free, FreeGpuBytes(device));
      least = std::min(least, free);
    }
    const double may_take = static_cast<double>(least) * settings.cuda.memory_fraction;
    ISOBIT_ASSIGN_OR_RETURN(defaults,
                            DefaultLimitsOf(config, settings.engine.runner.tensor_parallel_size,
                                            static_cast<int64_t>(may_take), settings.cuda.variant));
  }
  // A step has room for one token of each sequence.
  const int64_t tokens = limits.max_batch_tokens;
  if (limits.max_running == 0) {
    limits.max_running = defaults.max_running;
    if (tokens > 0) limits.max_running = std::min(limits.max_running, static_cast<size_t>(tokens));
  }
  if (tokens == 0) {
    limits.max_batch_tokens =
        std::max(defaults.max_batch_tokens, static_cast<int64_t>(limits.max_running));
  }
  return absl::OkStatus();
}

absl::StatusOr<MakeRank> ChooseRanks(const RolloutSettings& settings) {
  if (settings.backend.backend == BackendKind::kCpu) {
    CpuOptions cpu = settings.backend.cpu;
    cpu.mode = settings.engine.runner.mode;
    MakeHostOps make_variant_ops;
    if (settings.cuda.variant) {
      make_variant_ops = [variant = cpu]() mutable {
        variant.mode = kVariantMode;
        return MakeCpuBackend(variant);
      };
    }
    return MakeHostRank([cpu] { return MakeCpuBackend(cpu); }, settings.kv_cache_bytes,
                        std::move(make_variant_ops));
  }
  CudaRankOptions cuda = settings.cuda;
  cuda.devices = settings.backend.devices;
  const SpeculationOptions& speculation = settings.speculation;
  if (speculation.make_drafters) cuda.max_guesses = static_cast<int>(speculation.max_guesses);
  return MakeCudaRanks(cuda);
}

}  // namespace

absl::StatusOr<RolloutSettings> RolloutSettingsFromFlags() {
  RolloutSettings settings;
  EngineOptions& engine = settings.engine;
  ISOBIT_ASSIGN_OR_RETURN(ModelSettings model, ModelSettingsFromFlags());
  settings.model = std::move(model.name);
  engine.model_root = std::move(model.root);
  engine.load_format = model.load_format;
  engine.load_policy = std::move(model.load_policy);
  engine.runner.mode = model.numerics;
  engine.scheduler.share_prefixes = model.prefix_sharing;
  engine.runner.max_positions = model.max_context;
  settings.weight_stream = model.weight_stream;
  engine.runner.tensor_parallel_size = absl::GetFlag(FLAGS_tp_size);
  ISOBIT_RETURN_IF_ERROR(CheckRankCount("--tp_size", engine.runner.tensor_parallel_size));
  ISOBIT_RETURN_IF_ERROR(ReadMemory(settings));
  ISOBIT_RETURN_IF_ERROR(ReadQueue(model.max_batch_tokens, engine));
  ISOBIT_ASSIGN_OR_RETURN(settings.backend,
                          BackendSettingsFromFlags(engine.runner.tensor_parallel_size));
  ISOBIT_ASSIGN_OR_RETURN(settings.cuda, CudaOptionsFromFlags());
  ISOBIT_RETURN_IF_ERROR(ReadSpeculation(settings));
  ISOBIT_ASSIGN_OR_RETURN(settings.limits, StreamLimitsFromFlags());
  ISOBIT_ASSIGN_OR_RETURN(settings.server, ServerOptionsFromFlags());
  engine.runner.time_steps = settings.server.metrics_port.has_value();
  settings.vllm_face = absl::GetFlag(FLAGS_vllm_face);
  settings.vllm_tokenizer = absl::GetFlag(FLAGS_vllm_tokenizer);
  return settings;
}

absl::StatusOr<EngineOptions> FitToModel(const RolloutSettings& settings,
                                         const ModelConfig& config) {
  EngineOptions options = settings.engine;
  ModelRunnerOptions& runner = options.runner;
  const int64_t context = config.max_position_embeddings;
  if (runner.max_positions > context) {
    return absl::InvalidArgumentError(absl::StrCat("--max_context is ", runner.max_positions,
                                                   ", the model allows at most ", context));
  }
  ISOBIT_RETURN_IF_ERROR(ShapeOfRank(config, 0, runner.tensor_parallel_size).status());
  ISOBIT_RETURN_IF_ERROR(ChooseLimits(settings, config, options.scheduler));
  if (runner.max_positions == 0) runner.max_positions = context;
  runner.max_positions = std::min(runner.max_positions, options.scheduler.max_batch_tokens);
  ISOBIT_ASSIGN_OR_RETURN(runner.make_rank, ChooseRanks(settings));
  if (settings.wrap_ranks) runner.make_rank = settings.wrap_ranks(std::move(runner.make_rank));
  if (SpeculationOptions speculation = settings.speculation; speculation.make_drafters) {
    if (settings.backend.backend == BackendKind::kCuda) {
      const auto bytes =
          static_cast<double>(NumParameters(ModelPlan(config)) * sizeof(contract::Bf16));
      speculation.costs =
          GpuStepCosts(bytes / runner.tensor_parallel_size, runner.tensor_parallel_size);
    }
    options.make_guesser = Speculation::Maker(speculation);
  }
  return options;
}

}  // namespace isobit
