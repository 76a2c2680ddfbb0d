// The settings of isobit-scorer, read from its flags and environment and checked.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_SETTINGS_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_SETTINGS_H_

#include <chrono>
#include <string>

#include "absl/status/statusor.h"
#include "common/rpc/channel_security.h"
#include "common/rpc/server_runner.h"
#include "kernels/runtime/model_flags.h"
#include "kernels/runtime/rank_backend.h"
#include "trainer_bridge/scorer/process_place.h"
#include "trainer_bridge/scorer/scorer.h"
#include "trainer_bridge/scorer/scorer_service.h"

namespace isobit {

struct ScorerSettings {
  std::string model;
  ScorerOptions scorer;  // without a backend
  ScorerService::Options service;
  ProcessPlace place;
  BackendSettings backend;
  std::chrono::milliseconds timeout;  // of every wait for another rank or process
  ServerOptions server;
  ChannelSecurity upstream;  // of the channel to the group's leader
  std::string group_secret;  // shown to the leader; empty: none
};

// INVALID_ARGUMENT names the flag or variable.
absl::StatusOr<ScorerSettings> ScorerSettingsFromFlags();

// The backend that the flags ask for. nccl_id: see CudaBackendOptions. Errors: those of
// MakeCudaBackend.
absl::StatusOr<RankBackend> MakeScorerBackend(const ScorerSettings& settings,
                                              const std::string& nccl_id);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_SETTINGS_H_
