// The trainer process: isobit-trainer. Its flags are those of python/examples/on_policy/train.py.
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/exhaustion.h"
#include "common/base/exit_code.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/http/http_server.h"
#include "common/http/metrics_page.h"
#include "common/rpc/channel_flags.h"
#include "common/rpc/service_main.h"
#include "trainer_bridge/trainer/run.h"
#include "trainer_bridge/trainer/settings.h"
#include "trainer_bridge/trainer/stop_signal.h"
#include "trainer_bridge/trainer/trainer_metrics.h"

ABSL_FLAG(std::string, model, "",
          "The model that the services serve, a directory; the run begins there.");
ABSL_FLAG(std::string, rollout, "", "Address of the rollout, host:port.");
ABSL_FLAG(std::string, scorer, "", "Address of a scorer to keep on the same weights; empty: none.");
ABSL_FLAG(std::string, comparator, "",
          "Address of a comparator that is given both sides' logprobs of every step; empty: none.");
ABSL_FLAG(std::string, output, "", "The run's folder: metrics, checkpoints, the model at the end.");
ABSL_FLAG(bool, resume, false, "Go on from the folder's latest checkpoint.");
ABSL_FLAG(int64_t, steps, 100, "Optimizer steps in all.");
ABSL_FLAG(int64_t, save_every, 10, "Steps between checkpoints; two are kept.");
ABSL_FLAG(std::optional<int>, metrics_port, std::nullopt,
          "Serve metrics for Prometheus there, on 127.0.0.1; 0 chooses one. Unset: none.");
ABSL_FLAG(std::string, on_gap, "stop",
          "What a logprob does that differs: stop the run, or only report.");
// What decides about the weights, and may not change with --resume.
ABSL_FLAG(std::string, task, "share", "What to learn: share, for any model, also a random one.");
ABSL_FLAG(std::string, algorithm, "grpo",
          "grpo, or reinforce, which has the group's mean as its baseline, and nothing clipped.");
ABSL_FLAG(int64_t, prompts, 8, "Prompts a step.");
ABSL_FLAG(int64_t, samples, 8, "Samples of each prompt, its group.");
ABSL_FLAG(int64_t, max_tokens, 64, "The most tokens of a completion.");
ABSL_FLAG(double, temperature, 1.0, "Of the draw, above 0.");
ABSL_FLAG(uint64_t, seed, 1, "Of the draw, below 2^32.");
ABSL_FLAG(double, lr, 1e-6, "The learning rate.");
ABSL_FLAG(double, weight_decay, 0.0, "Of AdamW.");
ABSL_FLAG(double, max_norm, 1.0, "To which gradients are clipped.");
ABSL_FLAG(double, clip, 0.2, "grpo: by how much a token's ratio may leave 1.");
ABSL_FLAG(int64_t, pack_tokens, 4096, "Tokens of a pack.");
ABSL_FLAG(int64_t, lanes, 8, "A power of two: packs of a pass. It decides about the sums' order.");

namespace isobit {
namespace {

constexpr char kUsage[] =
    "isobit-trainer: trains on-policy: samples from a rollout, takes a step, sends the weights "
    "back.\n"
    "  isobit-trainer --model=DIR --rollout=HOST:PORT --output=DIR [--scorer=HOST:PORT]\n"
    "                 [--comparator=HOST:PORT] [--resume]";

trainer::Settings SettingsFromFlags() {
  trainer::Settings settings;
  settings.recipe = {.model = absl::GetFlag(FLAGS_model),
                     .task = absl::GetFlag(FLAGS_task),
                     .algorithm = absl::GetFlag(FLAGS_algorithm),
                     .prompts = absl::GetFlag(FLAGS_prompts),
                     .samples = absl::GetFlag(FLAGS_samples),
                     .max_tokens = absl::GetFlag(FLAGS_max_tokens),
                     .temperature = absl::GetFlag(FLAGS_temperature),
                     .seed = absl::GetFlag(FLAGS_seed),
                     .lr = absl::GetFlag(FLAGS_lr),
                     .weight_decay = absl::GetFlag(FLAGS_weight_decay),
                     .max_norm = absl::GetFlag(FLAGS_max_norm),
                     .clip = absl::GetFlag(FLAGS_clip),
                     .pack_tokens = absl::GetFlag(FLAGS_pack_tokens),
                     .lanes = absl::GetFlag(FLAGS_lanes)};
  settings.rollout = absl::GetFlag(FLAGS_rollout);
  settings.scorer = absl::GetFlag(FLAGS_scorer);
  settings.comparator = absl::GetFlag(FLAGS_comparator);
  settings.output = absl::GetFlag(FLAGS_output);
  settings.resume = absl::GetFlag(FLAGS_resume);
  settings.steps = absl::GetFlag(FLAGS_steps);
  settings.save_every = absl::GetFlag(FLAGS_save_every);
  settings.on_gap = absl::GetFlag(FLAGS_on_gap);
  settings.metrics_port = absl::GetFlag(FLAGS_metrics_port);
  return settings;
}

// Null: the metrics have no port.
absl::StatusOr<std::unique_ptr<HttpServer>> ServeMetrics(std::optional<int> port,
                                                         const trainer::TrainerMetrics& metrics) {
  if (!port) return nullptr;
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<HttpServer> server, HttpServer::Listen({.port = *port}));
  AddMetricsPage(*server, metrics.metrics());
  server->Start();
  std::cout << "metrics at http://127.0.0.1:" << server->port() << "/metrics" << std::endl;
  return server;
}

absl::Status Train(const trainer::Settings& settings, const ChannelSecurity& security) {
  trainer::TrainerMetrics metrics;
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> server,
                          ServeMetrics(settings.metrics_port, metrics));
  return trainer::Train(settings, security, metrics);
}

int TrainerMain(int argc, char** argv) {
  ExitWhenExhausted();
  ParseFlagsOrExit(argc, argv, kUsage);
  const trainer::Settings settings = SettingsFromFlags();
  if (const absl::Status checked = trainer::CheckSettings(settings); !checked.ok()) {
    ExitForBadUsage(argv[0], checked.message());
  }
  const absl::StatusOr<ChannelSecurity> security = ChannelSecurityFromFlags();
  if (!security.ok()) ExitForBadUsage(argv[0], security.status().message());
  PrepareOutput();
  trainer::HandleStopSignals();
  const absl::Status trained = Train(settings, *security);
  if (trained.ok()) return kExitStopped;
  internal::LastWords(absl::StrCat("error: ", trained.message(), "\n"));
  return kExitFailed;
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) { return isobit::TrainerMain(argc, argv); }
