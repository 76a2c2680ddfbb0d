// isobit-rollout: the rollout service as a program.
#include "common/rpc/service_main.h"
#include "rollout/service/rollout_process.h"
#include "rollout/service/rollout_settings.h"

int main(int argc, char** argv) {
  return isobit::ServiceMain(argc, argv, isobit::kRolloutUsage, &isobit::RolloutSettingsFromFlags,
                             &isobit::ServeRollout);
}
