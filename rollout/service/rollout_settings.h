// The settings of isobit-rollout, read from its flags and checked.
#ifndef ISOBIT_ROLLOUT_SERVICE_ROLLOUT_SETTINGS_H_
#define ISOBIT_ROLLOUT_SERVICE_ROLLOUT_SETTINGS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/rpc/server_runner.h"
#include "kernels/runtime/cuda_rank_options.h"
#include "kernels/runtime/model_flags.h"
#include "kernels/runtime/rank_executor.h"
#include "rollout/engine/engine.h"
#include "rollout/guesses/speculation.h"
#include "rollout/service/generate_stream.h"

namespace isobit {

struct RolloutSettings {
  std::string model;
  EngineOptions engine;  // FitToModel adds what depends on the model
  BackendSettings backend;
  SpeculationOptions speculation;  // without costs; no drafters: none
  CudaRankOptions cuda;            // without devices; on CPUs only `variant` counts
  int64_t kv_cache_bytes = 0;      // of all ranks together, on CPUs
  StreamLimits limits;
  WeightStreamLimits weight_stream;
  ServerOptions server;
  bool vllm_face = false;      // also serve the service of vllm_service.h
  std::string vllm_tokenizer;  // VllmModelNames::tokenizer
  // What the ranks are wrapped in; null: nothing. No flag sets it: tests' programs do.
  std::function<MakeRank(MakeRank)> wrap_ranks;
};

// INVALID_ARGUMENT names the flag. Other errors: those of ServerOptionsFromFlags.
absl::StatusOr<RolloutSettings> RolloutSettingsFromFlags();

// The engine's options for a model. INVALID_ARGUMENT: --max_context exceeds the model's context, or
// the ranks cannot share its heads equally. UNIMPLEMENTED: a GPU is asked for in a build without
// CUDA.
absl::StatusOr<EngineOptions> FitToModel(const RolloutSettings& settings,
                                         const ModelConfig& config);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_ROLLOUT_SETTINGS_H_
