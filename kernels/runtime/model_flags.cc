// Defines the flags, and turns them into settings.
#include "kernels/runtime/model_flags.h"

#include <numeric>
#include <set>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"

ABSL_FLAG(std::string, model_root, "",
          "Directory below which all models lie; no path that a client gives leaves it. Required.");
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
ABSL_FLAG(bool, allow_nonfinite_weights, false,
          "Take weights with NaNs or infinities in bf16, with which every logprob may be a NaN.");
ABSL_FLAG(std::string, numerics, "tree",
          "tree (the contract), or for contrast batch_invariant or vanilla.");
ABSL_FLAG(int64_t, max_context, 0,
          "Tokens of one sequence, prompt and completion together; 0: as many positions as the "
          "model has.");
// An int, since absl guards a flag of 16 bytes with a fence that the thread sanitizer cannot
// follow.
ABSL_FLAG(
    std::optional<int>, max_batch_tokens, std::nullopt,
    "Tokens that a rank computes at one time, for which it takes memory at the start. A "
    "rollout computes prompts whole, so it also bounds prompt + max_tokens there; a scorer "
    "runs a longer sequence alone. If not given: of a rollout 8192 on CPUs, on GPUs 16384 or, "
    "where memory is short, 8192; of a scorer 2048 on a CPU and 16384 on a GPU.");
ABSL_FLAG(bool, prefix_sharing, true,
          "Compute what prompts have in common once. Changes speed and memory, never a bit.");
ABSL_FLAG(
    int, weight_stream_timeout_s, 60,
    "How many seconds an update by stream waits for a sender that sends nothing, 1 to 86400.");
ABSL_FLAG(std::string, backend, "cpu", "cpu, or cuda: one GPU (H100, H200) for each rank.");
ABSL_FLAG(std::vector<std::string>, devices, {},
          "CUDA devices of this process's ranks, such as 0,1,2,3; empty: 0, 1, ..., for a scorer's "
          "process that torchrun calls LOCAL_RANK 1 the ones after these, and so on "
          "(--backend=cuda).");
ABSL_FLAG(std::string, isa, "auto",
          "CPU instruction set: auto, portable, avx2 or avx512. It changes speed, never a bit "
          "(--backend=cpu).");
ABSL_FLAG(int, threads_per_rank, 1,
          "CPU threads of each rank, 1 to 256. They change speed, never a bit (--backend=cpu).");

namespace isobit {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 24;

absl::StatusOr<BackendKind> ParseBackend(const std::string& name) {
  if (name == "cpu") return BackendKind::kCpu;
  if (name == "cuda") return BackendKind::kCuda;
  return absl::InvalidArgumentError(
      absl::StrCat("--backend is \"", name, "\", expected cpu or cuda"));
}

absl::StatusOr<std::vector<int>> ParseDevices(const std::vector<std::string>& names) {
  std::vector<int> devices;
  for (const std::string& name : names) {
    int device = 0;
    if (!absl::SimpleAtoi(name, &device) || device < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--devices names \"", name, "\", expected numbers such as 0,1,2,3"));
    }
    devices.push_back(device);
  }
  return devices;
}

absl::StatusOr<std::vector<int>> DevicesFromFlags(int num_ranks, int first_device) {
  ISOBIT_ASSIGN_OR_RETURN(std::vector<int> devices, ParseDevices(absl::GetFlag(FLAGS_devices)));
  if (devices.empty()) {
    devices.resize(static_cast<size_t>(num_ranks));
    std::iota(devices.begin(), devices.end(), first_device);
  }
  const std::set<int> different(devices.begin(), devices.end());
  if (different.size() != devices.size() || devices.size() != static_cast<size_t>(num_ranks)) {
    return absl::InvalidArgumentError(absl::StrCat("--devices names ", different.size(),
                                                   " different ones in ", devices.size(),
                                                   ", expected ", num_ranks, ", one a rank"));
  }
  return devices;
}

}  // namespace

absl::StatusOr<ModelSettings> ModelSettingsFromFlags() {
  ModelSettings settings;
  settings.root = absl::GetFlag(FLAGS_model_root);
  settings.name = absl::GetFlag(FLAGS_model);
  if (settings.root.empty()) return absl::InvalidArgumentError("--model_root is required");
  if (settings.name.empty()) return absl::InvalidArgumentError("--model is required");
  ISOBIT_ASSIGN_OR_RETURN(settings.load_format, ParseLoadFormat(absl::GetFlag(FLAGS_load_format)));
  settings.load_policy = {.ignored_fields = absl::GetFlag(FLAGS_ignore_config_fields),
                          .round_fp16 = absl::GetFlag(FLAGS_round_fp16_weights),
                          .allow_nonfinite = absl::GetFlag(FLAGS_allow_nonfinite_weights)};
  ISOBIT_ASSIGN_OR_RETURN(settings.numerics, ParseNumericsMode(absl::GetFlag(FLAGS_numerics)));
  settings.max_context = absl::GetFlag(FLAGS_max_context);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_context", settings.max_context, 0, kMaxTokens));
  settings.max_batch_tokens = absl::GetFlag(FLAGS_max_batch_tokens);
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("max_batch_tokens", settings.max_batch_tokens.value_or(1), 1, kMaxTokens));
  settings.prefix_sharing = absl::GetFlag(FLAGS_prefix_sharing);
  const int seconds = absl::GetFlag(FLAGS_weight_stream_timeout_s);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("weight_stream_timeout_s", seconds, 1, 86400));
  settings.weight_stream.max_silence = std::chrono::seconds(seconds);
  return settings;
}

absl::StatusOr<BackendSettings> BackendSettingsFromFlags(int num_ranks, int first_device) {
  BackendSettings settings;
  ISOBIT_ASSIGN_OR_RETURN(settings.backend, ParseBackend(absl::GetFlag(FLAGS_backend)));
  settings.cpu.num_threads = absl::GetFlag(FLAGS_threads_per_rank);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("threads_per_rank", settings.cpu.num_threads, 1, 256));
  ISOBIT_ASSIGN_OR_RETURN(settings.cpu.isa, cpu::ChooseIsa(absl::GetFlag(FLAGS_isa)));
  ISOBIT_ASSIGN_OR_RETURN(settings.devices, DevicesFromFlags(num_ranks, first_device));
  return settings;
}

}  // namespace isobit
