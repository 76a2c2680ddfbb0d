// The services that a run uses: connecting, sending weights, recording the gap. sampler.h draws the
// completions.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_SERVICES_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_SERVICES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/safetensors.h"
#include "common/rpc/channel_security.h"
#include "isobit/v1/comparator.grpc.pb.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "isobit/v1/scorer.grpc.pb.h"
#include "trainer_bridge/trainer/logprob_gap.h"

namespace isobit::trainer {

struct ServiceAddresses {
  std::string rollout;
  std::string scorer;      // empty: none
  std::string comparator;  // empty: none
  ChannelSecurity security;
};

// The digest of weights in memory, as the services compute it.
std::string DigestOf(absl::Span<const Tensor> weights);

class Services {
 public:
  // Waits until rollout and scorer serve. `fingerprint`: of the trainer's own arithmetic on its
  // model. FAILED_PRECONDITION: a service has another one, which the message shows. CANCELLED:
  // StopAsked.
  static absl::StatusOr<Services> Connect(const ServiceAddresses& addresses,
                                          const std::string& fingerprint);

  // Sends the weights after `step` optimizer steps to rollout and scorer, which refuse them if
  // what they read has another digest. Version ids continue from what the services had, one per
  // step.
  absl::Status SendWeights(absl::Span<const Tensor> weights, const std::string& digest,
                           int64_t step);

  // If there is a comparator, gives it both sides' logprobs of a batch; its counts must equal those
  // of `gap`. sides: the rollout's answer for each completion. The trainer's side states the
  // weights that it has sent: the comparator refuses tokens drawn by others.
  absl::Status Record(absl::Span<const v1::RecordSide> sides, const Logprobs& trainer,
                      const LogprobGap& gap);

  v1::RolloutService::Stub& rollout() { return *rollout_; }
  // The weights that were sent last.
  const v1::WeightVersion& serving() const { return *serving_; }
  const v1::Fingerprint& fingerprint() const { return fingerprint_; }

 private:
  Services() = default;

  std::unique_ptr<v1::RolloutService::Stub> rollout_;
  std::unique_ptr<v1::ScorerService::Stub> scorer_;          // may be null
  std::unique_ptr<v1::ComparatorService::Stub> comparator_;  // may be null
  v1::Fingerprint fingerprint_;
  uint64_t latest_version_ = 0;  // of both services, when connecting
  std::optional<v1::WeightVersion> serving_;
  uint64_t offset_ = 0;  // the version id after 0 optimizer steps, modulo 2^64
};

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_SERVICES_H_
