// One tensor-parallel engine behind the rollout service.
#include "rollout/service/rollout_process.h"

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/model_directory.h"
#include "common/http/metrics_page.h"
#include "common/parallel/tcp_broadcast.h"
#include "common/rpc/server_runner.h"
#include "kernels/runtime/cuda_backend.h"
#include "rollout/engine/engine.h"
#include "rollout/service/rollout_service.h"
#include "rollout/service/vllm_service.h"

namespace isobit {
namespace {

// directory: of the model.
absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(
    const RolloutSettings& settings, const std::string& directory,
    std::function<void(const absl::Status&)> on_failure) {
  ISOBIT_ASSIGN_OR_RETURN(
      const ModelConfig config,
      LoadModelConfig(directory, settings.engine.model_root, settings.engine.load_policy));
  ISOBIT_ASSIGN_OR_RETURN(EngineOptions options, FitToModel(settings, config));
  options.on_failure = std::move(on_failure);
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, Engine::Create(config, options));
  const ModelRunnerOptions& runner = engine->options().runner;
  const SchedulerLimits& limits = engine->options().scheduler;
  ISOBIT_LOG(Info) << ArchitectureName(config.architecture) << ", " << config.num_layers
                   << " layers, on " << runner.tensor_parallel_size << " ranks, numerics "
                   << NumericsModeName(runner.mode) << ", " << runner.num_pages << " KV pages of "
                   << runner.page_size << " tokens, at most " << runner.max_positions
                   << " tokens a sequence; steps of at most " << limits.max_running
                   << " sequences and " << limits.max_batch_tokens << " tokens; prefix sharing "
                   << (limits.share_prefixes ? "on" : "off");
  return engine;
}

}  // namespace

absl::StatusOr<int> ServeRollout(const RolloutSettings& settings) {
  ServerRunner* fails = nullptr;  // the runner, which ends before the services and the engine
  ISOBIT_ASSIGN_OR_RETURN(const std::string directory,
                          ResolveModelPath(settings.engine.model_root, settings.model));
  ISOBIT_ASSIGN_OR_RETURN(
      const std::unique_ptr<Engine> engine,
      MakeEngine(settings, directory, [&](const absl::Status& failure) { fails->Fail(failure); }));
  const bool on_gpus = settings.backend.backend == BackendKind::kCuda;
  RolloutService service(
      *engine, settings.limits, settings.server.security.gate, settings.server.metrics,
      settings.weight_stream,
      {.join = on_gpus ? JoinNcclBroadcast(settings.backend.devices.front()) : JoinTcpBroadcast});
  VllmService vllm_service(
      service, *engine,
      {.served = settings.model, .directory = directory, .tokenizer = settings.vllm_tokenizer},
      [&] { return fails->is_serving(); });
  ServerRunner runner(settings.server);
  fails = &runner;
  runner.Register(&service, v1::RolloutService::service_full_name());
  if (settings.vllm_face) {
    runner.Register(&vllm_service, vllm_wire::VllmEngine::service_full_name());
  }
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> metrics_page,
                          ServeMetrics(settings.server, runner));
  ISOBIT_RETURN_IF_ERROR(runner.Start());
  engine->UpdateWeights({.model_path = settings.model},
                        [&](const absl::StatusOr<WeightUpdateResult>& loaded) {
                          if (runner.is_draining()) return;  // weights that nobody awaits
                          if (!loaded.ok()) return runner.Fail(loaded.status());
                          runner.SetServing(true);
                          ISOBIT_LOG(Info) << "serving, backend " << engine->backend();
                        });
  engine->Start();
  const int code = runner.Wait([&] {
    engine->BeginDrain();
    service.BeginDrain();
  });
  if (engine->is_preparing()) {
    FlushLog();
    std::_Exit(code);  // loading may take minutes, and there is nobody left to serve
  }
  engine->Stop();
  return code;
}

}  // namespace isobit
