// The flags that rollout and scorer share: those of their model, and of the backend.
#ifndef ISOBIT_KERNELS_RUNTIME_MODEL_FLAGS_H_
#define ISOBIT_KERNELS_RUNTIME_MODEL_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/load_policy.h"
#include "common/checkpoint/streamed_source.h"
#include "common/config/numerics_mode.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/model/load_format.h"

namespace isobit {

struct ModelSettings {
  std::string root;  // directory below which all models lie
  std::string name;  // the model to load first: a path from `root`
  LoadFormat load_format = LoadFormat::kAuto;
  LoadPolicy load_policy;
  NumericsMode numerics = NumericsMode::kTree;
  int64_t max_context = 0;                    // tokens of a sequence; 0: the model's maximum
  std::optional<int64_t> max_batch_tokens{};  // unset: the service's own
  bool prefix_sharing = true;                 // compute common beginnings of prompts only once
  WeightStreamLimits weight_stream{};
};

// INVALID_ARGUMENT names the flag.
absl::StatusOr<ModelSettings> ModelSettingsFromFlags();

enum class BackendKind { kCpu, kCuda };

struct BackendSettings {
  BackendKind backend = BackendKind::kCpu;
  CpuOptions cpu;            // of each rank
  std::vector<int> devices;  // CUDA ordinals, one for each rank
};

// num_ranks: those of this process. first_device: the first one if --devices names none.
// INVALID_ARGUMENT, naming the flag: also for flags of the backend that was not chosen.
absl::StatusOr<BackendSettings> BackendSettingsFromFlags(int num_ranks, int first_device = 0);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_MODEL_FLAGS_H_
