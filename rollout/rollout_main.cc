// isobit-rollout: one tensor-parallel engine behind the rollout service.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/allocator.h"
#include "common/base/exhaustion.h"
#include "common/base/log.h"
#include "common/base/rank_count.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/model_directory.h"
#include "common/config/flags.h"
#include "common/rpc/server_flags.h"
#include "common/rpc/server_runner.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/model/host_executor.h"
#include "kernels/model/numerics.h"
#include "kernels/model/rank_shape.h"
#include "rollout/cuda_backend.h"
#include "rollout/engine.h"
#include "rollout/rollout_service.h"

ABSL_FLAG(std::string, model_root, ".", "Directory below which all models lie.");
ABSL_FLAG(std::string, model, "", "Model directory to serve, relative to --model_root. Required.");
ABSL_FLAG(std::string, load_format, "auto",
          "auto: weights from safetensors; dummy: random ones for config.json, from a seed.");
ABSL_FLAG(std::vector<std::string>, ignore_config_fields, {},
          "Fields of config.json, such as auto_map,rope_scaling.beta, that may be there although "
          "isobit does not honour them. Those that are found are logged.");
ABSL_FLAG(
    bool, round_fp16_weights, false,
    "Take fp16 weights and round them to bf16, which costs precision that an fp16 engine has.");
ABSL_FLAG(int, tp_size, 4,
          absl::StrCat("Tensor-parallel ranks, one thread each: ", isobit::kRankCounts, "."));
ABSL_FLAG(std::string, numerics, "tree",
          "tree (the contract), or for contrast batch_invariant or vanilla.");
ABSL_FLAG(std::string, backend, "cpu", "cpu, or cuda: one GPU (H100, H200) for each rank.");
ABSL_FLAG(std::vector<std::string>, devices, {},
          "CUDA devices of the ranks, such as 0,1,2,3; empty: 0, 1, ... (--backend=cuda).");
ABSL_FLAG(double, gpu_memory_fraction, 0.9,
          "Part of each GPU's free memory that the engine may take (--backend=cuda).");
ABSL_FLAG(bool, cuda_graphs, true,
          "Replay CUDA graphs for decode steps of up to 512 sequences, larger ones run without; it "
          "changes speed, never a bit (--backend=cuda).");
ABSL_FLAG(bool, peer_memory, true,
          "Exchange through the GPUs' mapped memory, else by NCCL; it changes speed, never a bit "
          "(--backend=cuda).");
ABSL_FLAG(int64_t, peer_timeout_ms, 2000,
          "How long a rank's GPU waits for another one until the service fails (--backend=cuda).");
ABSL_FLAG(std::string, inject_gpu_fault, "",
          "RANK:STEP fails that rank on its GPU in that step, to see what then happens.");
ABSL_FLAG(int, page_size, 16, "Tokens in a KV page.");
ABSL_FLAG(int, num_pages, 0,
          "KV pages; 0 takes as many as --kv_cache_mb or --gpu_memory_fraction allows.");
ABSL_FLAG(int64_t, kv_cache_mb, 1024,
          "Memory for keys and values of all ranks, in MiB (--backend=cpu).");
ABSL_FLAG(int64_t, max_batch_tokens, 8192,
          "Tokens in one step. Prompts are computed whole, so it also bounds prompt + max_tokens.");
ABSL_FLAG(int, max_running, 64, "Sequences in one step.");
ABSL_FLAG(int, max_waiting, 1024, "Requests that may queue.");
ABSL_FLAG(int64_t, max_waiting_tokens, 4 << 20, "Prompt tokens that may queue.");
ABSL_FLAG(int64_t, max_requests_mb, 256,
          "Memory of requests that wait or run, in MiB; more are refused with RESOURCE_EXHAUSTED.");
ABSL_FLAG(int64_t, max_unread_mb, 1024,
          "Memory of results that clients have not read, and of their calls, in MiB; a stream that "
          "would need more ends with RESOURCE_EXHAUSTED.");
ABSL_FLAG(double, max_client_share, 0.5,
          "Part of --max_requests_mb and --max_unread_mb that one client may take.");
ABSL_FLAG(int64_t, max_context, 0, "Tokens of one sequence; 0 takes what the model allows.");
ABSL_FLAG(std::string, isa, "auto",
          "CPU instruction set: auto, portable, avx2 or avx512. It changes speed, never a bit.");
ABSL_FLAG(int, threads_per_rank, 1, "CPU threads of each rank. They change speed, never a bit.");

namespace isobit {
namespace {

constexpr char kUsage[] =
    "isobit-rollout --model_root=DIR --model=NAME [flags]\n"
    "Generates tokens with a Hugging Face model on tensor-parallel ranks, over gRPC\n"
    "(isobit.v1.RolloutService). Stops on SIGTERM once calls in flight have finished.";

absl::StatusOr<CpuOptions> CpuOptionsFromFlags() {
  CpuOptions options;
  options.num_threads = absl::GetFlag(FLAGS_threads_per_rank);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("threads_per_rank", options.num_threads, 1, 256));
  ISOBIT_ASSIGN_OR_RETURN(options.isa, cpu::ChooseIsa(absl::GetFlag(FLAGS_isa)));
  return options;
}

// The flags that stand for themselves.
absl::StatusOr<EngineOptions> EngineOptionsFromFlags() {
  constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();
  ISOBIT_RETURN_IF_ERROR(RequireInRange("page_size", absl::GetFlag(FLAGS_page_size), 1, 1 << 20));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("num_pages", absl::GetFlag(FLAGS_num_pages), 0, kMaxInt));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("kv_cache_mb", absl::GetFlag(FLAGS_kv_cache_mb), 1, 1 << 30));
  // As many as a CUDA grid has along y (step_kernels.h).
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_running", absl::GetFlag(FLAGS_max_running), 1, 65535));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_batch_tokens", absl::GetFlag(FLAGS_max_batch_tokens),
                                        absl::GetFlag(FLAGS_max_running), 1 << 24));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("max_waiting", absl::GetFlag(FLAGS_max_waiting), 1, 1 << 24));
  ISOBIT_RETURN_IF_ERROR(RequireInRange(
      "max_waiting_tokens", absl::GetFlag(FLAGS_max_waiting_tokens), 1, int64_t{1} << 40));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("max_context", absl::GetFlag(FLAGS_max_context), 0, 1 << 24));

  EngineOptions options;
  options.model_root = absl::GetFlag(FLAGS_model_root);
  ISOBIT_ASSIGN_OR_RETURN(options.load_format, ParseLoadFormat(absl::GetFlag(FLAGS_load_format)));
  options.load_policy = {.ignored_fields = absl::GetFlag(FLAGS_ignore_config_fields),
                         .round_fp16 = absl::GetFlag(FLAGS_round_fp16_weights)};
  options.runner.tensor_parallel_size = absl::GetFlag(FLAGS_tp_size);
  ISOBIT_ASSIGN_OR_RETURN(options.runner.mode, ParseNumericsMode(absl::GetFlag(FLAGS_numerics)));
  options.runner.page_size = absl::GetFlag(FLAGS_page_size);
  options.runner.num_pages = absl::GetFlag(FLAGS_num_pages);
  options.runner.max_positions = absl::GetFlag(FLAGS_max_context);
  options.scheduler.max_running = static_cast<size_t>(absl::GetFlag(FLAGS_max_running));
  options.scheduler.max_batch_tokens = absl::GetFlag(FLAGS_max_batch_tokens);
  options.max_waiting_requests = static_cast<size_t>(absl::GetFlag(FLAGS_max_waiting));
  options.max_waiting_tokens = absl::GetFlag(FLAGS_max_waiting_tokens);
  return options;
}

absl::StatusOr<StreamLimits> StreamLimitsFromFlags() {
  StreamLimits limits;
  const double share = absl::GetFlag(FLAGS_max_client_share);
  ISOBIT_ASSIGN_OR_RETURN(
      limits.requests,
      ByteLimitsOf("max_requests_mb", absl::GetFlag(FLAGS_max_requests_mb), share));
  ISOBIT_ASSIGN_OR_RETURN(limits.results,
                          ByteLimitsOf("max_unread_mb", absl::GetFlag(FLAGS_max_unread_mb), share));
  return limits;
}

// The context length that model and flags allow.
absl::Status FitToModel(const ModelConfig& config, EngineOptions& options) {
  ModelRunnerOptions& runner = options.runner;
  const int64_t context = config.max_position_embeddings;
  if (runner.max_positions > context) {
    return absl::InvalidArgumentError(absl::StrCat("--max_context is ", runner.max_positions,
                                                   ", the model allows at most ", context));
  }
  if (runner.max_positions == 0) runner.max_positions = context;
  runner.max_positions = std::min(runner.max_positions, options.scheduler.max_batch_tokens);
  return absl::OkStatus();
}

// The number of KV pages that --kv_cache_mb allows.
absl::Status FitToHostMemory(const ModelConfig& config, EngineOptions& options) {
  ModelRunnerOptions& runner = options.runner;
  if (runner.num_pages > 0) return absl::OkStatus();
  ISOBIT_ASSIGN_OR_RETURN(const RankShape whole, ShapeOfRank(config, 0, 1));  // all ranks together
  const auto page_bytes = static_cast<int64_t>(KvCache::PageBytes(config, whole, runner.page_size));
  const int64_t affordable = (absl::GetFlag(FLAGS_kv_cache_mb) << 20) / page_bytes;
  // More than this many can never be in use.
  const int64_t useful = (runner.max_positions / runner.page_size + 1) *
                         static_cast<int64_t>(options.scheduler.max_running);
  if (affordable < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--kv_cache_mb holds no page: one takes ", page_bytes, " bytes"));
  }
  runner.num_pages = static_cast<int32_t>(
      std::min<int64_t>({affordable, useful, std::numeric_limits<int32_t>::max()}));
  return absl::OkStatus();
}

absl::StatusOr<CudaBackendOptions> CudaOptionsFromFlags() {
  CudaBackendOptions options;
  ISOBIT_ASSIGN_OR_RETURN(options.devices, ParseDevices(absl::GetFlag(FLAGS_devices)));
  options.memory_fraction = absl::GetFlag(FLAGS_gpu_memory_fraction);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("gpu_memory_fraction", options.memory_fraction, 0.01, 1.0));
  options.peer_memory = absl::GetFlag(FLAGS_peer_memory);
  options.use_graphs = absl::GetFlag(FLAGS_cuda_graphs);
  const int64_t timeout = absl::GetFlag(FLAGS_peer_timeout_ms);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("peer_timeout_ms", timeout, 1, 60'000));
  options.peer_timeout = absl::Milliseconds(timeout);
  if (const std::string fault = absl::GetFlag(FLAGS_inject_gpu_fault); !fault.empty()) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(fault, absl::MaxSplits(':', 1));
    if (!absl::SimpleAtoi(parts.first, &options.fault_rank) ||
        !absl::SimpleAtoi(parts.second, &options.fault_step)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--inject_gpu_fault is \"", fault, "\", expected RANK:STEP"));
    }
  }
  return options;
}

// Where the ranks compute, and how many KV pages fit there.
absl::Status ChooseBackend(const ModelConfig& config, EngineOptions& options) {
  const std::string backend = absl::GetFlag(FLAGS_backend);
  if (backend == "cpu") {
    ISOBIT_ASSIGN_OR_RETURN(const CpuOptions cpu, CpuOptionsFromFlags());
    options.runner.make_rank = MakeHostRank([cpu] { return MakeCpuOps(cpu); });
    return FitToHostMemory(config, options);
  }
  if (backend == "cuda") {
    ISOBIT_ASSIGN_OR_RETURN(const CudaBackendOptions cuda, CudaOptionsFromFlags());
    return UseCuda(cuda, config, options);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--backend is \"", backend, "\", expected cpu or cuda"));
}

absl::StatusOr<std::unique_ptr<Engine>> EngineFromFlags(
    std::function<void(const absl::Status&)> on_failure) {
  ISOBIT_ASSIGN_OR_RETURN(EngineOptions options, EngineOptionsFromFlags());
  options.on_failure = std::move(on_failure);
  const std::string model = absl::GetFlag(FLAGS_model);
  if (model.empty()) return absl::InvalidArgumentError("--model is required");
  ISOBIT_ASSIGN_OR_RETURN(const std::string directory, ResolveModelPath(options.model_root, model));
  ISOBIT_ASSIGN_OR_RETURN(const ModelConfig config,
                          LoadModelConfig(directory, options.model_root, options.load_policy));
  ISOBIT_RETURN_IF_ERROR(FitToModel(config, options));
  ISOBIT_RETURN_IF_ERROR(ChooseBackend(config, options));
  ISOBIT_LOG(Info) << ArchitectureName(config.architecture) << ", " << config.num_layers
                   << " layers, on " << options.runner.tensor_parallel_size << " ranks, numerics "
                   << NumericsModeName(options.runner.mode) << ", " << options.runner.num_pages
                   << " KV pages of " << options.runner.page_size << " tokens, at most "
                   << options.runner.max_positions << " tokens a sequence";
  return Engine::Create(config, options);
}

int Run() {
  const absl::StatusOr<ServerOptions> server = ServerOptionsFromFlags();
  const absl::StatusOr<StreamLimits> limits = StreamLimitsFromFlags();
  if (!server.ok() || !limits.ok()) {
    ISOBIT_LOG(Error) << (server.ok() ? limits.status() : server.status()).message();
    return 2;
  }
  ServerRunner* fails = nullptr;
  const auto engine = EngineFromFlags([&](const absl::Status& failure) { fails->Fail(failure); });
  if (!engine.ok()) {
    ISOBIT_LOG(Error) << engine.status().message();
    return 2;
  }
  RolloutService service(**engine, *limits, server->security.gate);
  ServerRunner runner(*server);
  fails = &runner;
  runner.Register(&service, v1::RolloutService::service_full_name());
  if (const absl::Status started = runner.Start(); !started.ok()) {
    ISOBIT_LOG(Error) << started.message();
    return 2;
  }
  (*engine)->UpdateWeights({.model_path = absl::GetFlag(FLAGS_model)},
                           [&](const absl::StatusOr<WeightUpdateResult>& loaded) {
                             if (runner.is_draining()) return;  // weights that nobody awaits
                             if (!loaded.ok()) return runner.Fail(loaded.status());
                             runner.SetServing(true);
                             ISOBIT_LOG(Info) << "serving, backend " << (*engine)->backend();
                           });
  (*engine)->Start();
  const int code = runner.Wait([&] { (*engine)->BeginDrain(); });
  if ((*engine)->is_staging()) {
    std::fflush(nullptr);
    std::_Exit(code);  // nobody is left to serve with what may take minutes to load
  }
  (*engine)->Stop();
  return code;
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) {
  isobit::ExitWhenExhausted();
  isobit::ReturnLargeBlocksWhenFreed();
  isobit::ServerRunner::BlockStopSignals();
  isobit::ParseFlagsOrExit(argc, argv, isobit::kUsage);
  return isobit::Run();
}
