// A probed pass between two steps: what the engine computes, op by op. See engine.h.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/config/token_ids.h"
#include "rollout/engine/engine.h"

namespace isobit {

absl::Status Engine::CheckProbe(const std::vector<int32_t>& tokens) const {
  const auto most = std::min({limits_.max_batch_tokens, limits_.context_length, limits_.kv_tokens});
  if (tokens.empty() || static_cast<int64_t>(tokens.size()) > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_ids: ", tokens.size(), " entries, expected 1 to ", most));
  }
  return CheckTokenIds("token_ids", tokens, plan_.config.vocab_size);
}

void Engine::Probe(std::vector<int32_t> tokens, const ProbeWanted& wanted, Reply<ProbeResult> reply,
                   const IsAbandoned& is_abandoned) {
  if (const absl::Status valid = CheckProbe(tokens); !valid.ok()) return reply(valid);
  bool was_paused = false;
  {
    const std::lock_guard lock(mutex_);
    was_paused = gate_.is_paused();
  }
  RunPaused<ProbeResult>(
      PauseMode::kKeep, std::move(reply), is_abandoned,
      [this, tokens = std::move(tokens), wanted, was_paused](const PauseResult& /*paused*/) {
        auto result = RunProbe(tokens, wanted);
        if (!was_paused) {
          ResumeBetweenSteps(absl::AbortedError("generation was continued after a probe"));
        }
        return result;
      });
}

absl::StatusOr<ProbeResult> Engine::RunProbe(const std::vector<int32_t>& tokens,
                                             const ProbeWanted& wanted) {
  ISOBIT_RETURN_IF_ERROR(gate_.Available());
  if (!gate_.is_paused() || !IsQuiet()) {
    return absl::AbortedError("generation was continued before the probe");
  }
  if (version_ == nullptr || !runner_->has_weights()) {
    return absl::FailedPreconditionError("no weights serve");
  }
  absl::StatusOr<ProbeReport> report = runner_->Probe(tokens, wanted);
  const bool is_harmless = report.ok() || absl::IsUnimplemented(report.status()) ||
                           absl::IsResourceExhausted(report.status());
  if (!is_harmless) Fail(report.status());
  ISOBIT_RETURN_IF_ERROR(report.status());
  return ProbeResult{*std::move(report), *version_};
}

}  // namespace isobit
