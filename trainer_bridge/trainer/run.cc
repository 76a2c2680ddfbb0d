// The loop, and what it prints and saves.
#include "trainer_bridge/trainer/run.h"

#include <chrono>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/status_macros.h"
#include "common/config/numerics_mode.h"
#include "kernels/model/numerics.h"
#include "trainer_bridge/trainer/advantages.h"
#include "trainer_bridge/trainer/learner.h"
#include "trainer_bridge/trainer/mean.h"
#include "trainer_bridge/trainer/run_folder.h"
#include "trainer_bridge/trainer/sampler.h"
#include "trainer_bridge/trainer/services.h"
#include "trainer_bridge/trainer/stop_signal.h"
#include "trainer_bridge/trainer/task.h"

namespace isobit::trainer {
namespace {

using Json = nlohmann::ordered_json;

void Say(const std::string& text) { std::cout << text << std::endl; }

// Seconds by part of a step.
class Clock {
 public:
  void Lap(const char* part) {
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    parts_[part] += seconds;
    total_ += seconds;
    last_ = now;
  }

  const std::map<std::string, double>& parts() const { return parts_; }

  std::string Told() const {
    std::string told;
    for (const char* part : TrainerMetrics::kParts) {
      const auto found = parts_.find(part);
      if (found == parts_.end()) continue;
      absl::StrAppendFormat(&told, "%s%s %.1f", told.empty() ? "" : ", ", part, found->second);
    }
    return absl::StrFormat("%.1f s (%s)", total_, told);
  }

 private:
  std::map<std::string, double> parts_;  // some of TrainerMetrics::kParts
  double total_ = 0;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

class Run {
 public:
  Run(const Settings& settings, const Task& task, Learner& learner, Services& services,
      RunFolder& folder, TrainerMetrics& metrics)
      : settings_(settings),
        task_(task),
        learner_(learner),
        services_(services),
        folder_(folder),
        metrics_(metrics) {}

  absl::Status Go() {
    ISOBIT_RETURN_IF_ERROR(Begin());
    absl::Status status;
    while (status.ok() && step_ < settings_.steps) status = NextStep();
    const bool is_stopped = StopAsked() && absl::IsCancelled(status);
    if (!status.ok() && !is_stopped) return status;
    if (is_stopped) Say(absl::StrCat("stopped after step ", step_, "; --resume goes on"));
    ISOBIT_RETURN_IF_ERROR(Save());
    ISOBIT_RETURN_IF_ERROR(learner_.Save(folder_.ModelPath()));
    ISOBIT_RETURN_IF_ERROR(CopyModelTexts(settings_.recipe.model, folder_.ModelPath()));
    Say(absl::StrCat("weights after step ", step_, ": ", digest_));
    return absl::OkStatus();
  }

 private:
  absl::Status Begin() {
    ISOBIT_ASSIGN_OR_RETURN(const std::optional<Saved> saved, folder_.Load());
    if (saved) {
      step_ = saved->step;
      ISOBIT_RETURN_IF_ERROR(learner_.Restore(saved->state, step_));
      if (const std::string is = DigestOf(learner_.Weights()); is != saved->weights_digest) {
        return absl::DataLossError(absl::StrCat("the checkpoint of step ", step_,
                                                " was saved with weights ", saved->weights_digest,
                                                ", but holds ", is));
      }
      Say(absl::StrCat("goes on after step ", step_));
    }
    return Sync();
  }

  absl::Status Sync() {
    const std::vector<Tensor> weights = learner_.Weights();
    digest_ = DigestOf(weights);
    return services_.SendWeights(weights, digest_, step_);
  }

  absl::Status Save() { return folder_.Save(step_, digest_, learner_.State()); }

  absl::Status NextStep() {
    if (StopAsked()) return absl::CancelledError("stopped");
    Clock clock;
    absl::StatusOr<Json> values = Differentiate(clock);
    if (!values.ok()) {
      learner_.Drop();
      ISOBIT_RETURN_IF_ERROR(Save());
      return values.status();
    }
    ISOBIT_ASSIGN_OR_RETURN((*values)["grad_norm"], learner_.Step());
    clock.Lap("train");
    // From here on the step counts; a signal waits, and a service that fails does not undo it.
    ++step_;
    const absl::Status synced = Sync();
    clock.Lap("sync");
    ISOBIT_RETURN_IF_ERROR(Tell(*std::move(values), clock));
    if (!synced.ok() || step_ % settings_.save_every == 0) ISOBIT_RETURN_IF_ERROR(Save());
    return synced;
  }

  // Adds the step's metrics to the folder, and says some of them.
  absl::Status Tell(Json values, const Clock& clock) {
    values["weights_digest"] = digest_;
    values["seconds"] = clock.parts();
    metrics_.AddStep(step_, values["reward"].get<double>(), clock.parts());
    Say(absl::StrFormat("step %d/%d  reward %.3f  unequal %d of %d  KL %.3g  %s", step_,
                        settings_.steps, values["reward"].get<double>(),
                        values["unequal"].get<int64_t>(), values["compared"].get<int64_t>(),
                        values["kl"].get<double>(), clock.Told()));
    return folder_.Add(step_, values);
  }

  // Samples a batch, leaves its gradient in the learner, compares, and returns the step's metrics.
  absl::StatusOr<Json> Differentiate(Clock& clock) {
    const Recipe& recipe = settings_.recipe;
    ISOBIT_ASSIGN_OR_RETURN(const Batch batch, Sample(services_, task_, recipe, step_));
    clock.Lap("sample");
    std::vector<double> rewards;
    for (const Completion& completion : batch.completions) rewards.push_back(completion.reward);
    ISOBIT_ASSIGN_OR_RETURN(
        const std::vector<double> advantages,
        Advantages(rewards, static_cast<size_t>(recipe.samples), recipe.algorithm == "grpo"));
    ISOBIT_ASSIGN_OR_RETURN(const Learner::Differentiated differentiated,
                            learner_.Gradients(batch.completions, advantages));
    clock.Lap("train");
    ISOBIT_ASSIGN_OR_RETURN(const LogprobGap gap, Check(batch, differentiated.logprobs));
    clock.Lap("compare");
    return Json{{"reward", Mean(rewards)},
                {"reward_deviation", Deviation(rewards)},
                {"tokens", gap.tokens},
                {"staleness", 0.0},
                {"entropy", differentiated.entropy},
                {"compared", gap.tokens},
                {"unequal", gap.unequal},
                {"max_abs_dlogp", gap.max_abs_dlogp},
                {"kl", gap.kl}};
  }

  // The gap of a batch that the present weights drew.
  absl::StatusOr<LogprobGap> Check(const Batch& batch, const Logprobs& trainer) {
    ISOBIT_ASSIGN_OR_RETURN(const LogprobGap gap, FindGap(batch.completions, trainer));
    ISOBIT_RETURN_IF_ERROR(services_.Record(batch.sides, trainer, gap));
    metrics_.AddComparison(gap);
    if ((gap.unequal == 0 && gap.impossible == 0) || settings_.on_gap == "report") return gap;
    std::vector<std::string> faults;
    if (gap.unequal > 0) {
      faults.push_back(absl::StrFormat(
          "%d have another logprob in the trainer than in the rollout, by up to %.3g", gap.unequal,
          gap.max_abs_dlogp));
    }
    if (gap.impossible > 0) {
      faults.push_back(
          absl::StrFormat("%d have a logprob that no token is drawn with", gap.impossible));
    }
    return absl::DataLossError(
        absl::StrFormat("step %d: of %d tokens, %s; the first is %s. --on_gap=report would go on.",
                        step_ + 1, gap.tokens, absl::StrJoin(faults, " and "), gap.first));
  }

  const Settings& settings_;
  const Task& task_;
  Learner& learner_;
  Services& services_;
  RunFolder& folder_;
  TrainerMetrics& metrics_;
  int64_t step_ = 0;    // optimizer steps so far
  std::string digest_;  // of the weights after them
};

}  // namespace

absl::Status Train(const Settings& given, const ChannelSecurity& security,
                   TrainerMetrics& metrics) {
  Settings settings = given;
  std::error_code error;
  const auto model = std::filesystem::canonical(settings.recipe.model, error);
  if (error) {
    return absl::NotFoundError(
        absl::StrCat("--model ", settings.recipe.model, ": ", error.message()));
  }
  settings.recipe.model = model.string();
  const Recipe& recipe = settings.recipe;
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Learner> learner, Learner::Load(recipe));
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Task> task,
                          MakeTask(recipe.task, learner->config().vocab_size));
  absl::StatusOr<Services> services =
      Services::Connect({settings.rollout, settings.scorer, settings.comparator, security},
                        FingerprintOf(learner->config(), NumericsMode::kTree));
  if (!services.ok()) {
    return StopAsked() ? absl::OkStatus() : services.status();
  }
  ISOBIT_ASSIGN_OR_RETURN(RunFolder folder,
                          RunFolder::Open(settings.output, ToJson(recipe), settings.resume));
  Say(absl::StrCat(model.filename().string(), ", ", recipe.task, ", ", recipe.algorithm));
  return Run(settings, *task, *learner, *services, folder, metrics).Go();
}

}  // namespace isobit::trainer
