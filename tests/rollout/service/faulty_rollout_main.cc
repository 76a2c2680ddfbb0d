// isobit-rollout with one more flag: a fault in a chosen step.
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/status_macros.h"
#include "common/rpc/service_main.h"
#include "rollout/service/rollout_process.h"
#include "rollout/service/rollout_settings.h"
#include "tests/support/faulty_rank.h"
#include "tests/support/trap_gpu.h"

ABSL_FLAG(std::string, inject_gpu_fault, "",
          "RANK:STEP makes that rank's GPU fail in that step; on CPUs, the rank.");

namespace isobit {
namespace {

absl::StatusOr<RolloutSettings> SettingsWithFault() {
  ISOBIT_ASSIGN_OR_RETURN(RolloutSettings settings, RolloutSettingsFromFlags());
  const std::string flag = absl::GetFlag(FLAGS_inject_gpu_fault);
  const std::pair<std::string, std::string> parts = absl::StrSplit(flag, absl::MaxSplits(':', 1));
  testing_support::Fault fault;
  if (!absl::SimpleAtoi(parts.first, &fault.rank) || !absl::SimpleAtoi(parts.second, &fault.step) ||
      fault.rank < 0 || fault.rank >= settings.engine.runner.tensor_parallel_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--inject_gpu_fault is \"", flag, "\", expected RANK:STEP, with RANK from 0 to ",
        settings.engine.runner.tensor_parallel_size - 1));
  }
  const std::vector<int>& devices = settings.backend.devices;
  const int device = devices.empty() ? 0 : devices[static_cast<size_t>(fault.rank)];
  fault.happen = [device] { return testing_support::TrapGpu(device); };
  settings.wrap_ranks = [fault = std::move(fault)](MakeRank make_rank) {
    return testing_support::WithFault(std::move(make_rank), fault);
  };
  return settings;
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) {
  return isobit::ServiceMain(argc, argv, isobit::kRolloutUsage, &isobit::SettingsWithFault,
                             &isobit::ServeRollout);
}
