// One Compare call, from its prompts to its summary.
//
// Each prompt goes to Generate, and each complete sample at once to Score. Each score is compared;
// its gaps and its report wait for the reader. The next prompt starts only when all samples of an
// earlier one are reported, so a slow reader delays the work but cannot fill the memory. The first
// error ends the session and cancels all its calls to the two services.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_SESSION_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_SESSION_H_

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "common/access/held_bytes.h"
#include "common/rpc/steady_time.h"
#include "common/rpc/stream_writer.h"
#include "isobit/v1/comparator.pb.h"
#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/recording.h"
#include "trainer_bridge/comparator/report.h"
#include "trainer_bridge/comparator/upstreams.h"

namespace isobit {

class CompareSession final : public std::enable_shared_from_this<CompareSession> {
 public:
  // Charges the client's quota for so many tokens. Errors: those of CallGate::Admit.
  using AdmitTokens = std::function<absl::Status(int64_t tokens)>;

  // Starts a session that answers the call of `context`. It lives until that call and its own calls
  // to the two services end. The stream ends with the errors of ValidateCompareRequest, or with
  // RESOURCE_EXHAUSTED if it needs more than `memory` allows. Calls `admit` once the amounts are
  // known to be within bounds, and only while the call lasts; an error from it ends the call.
  // recording: gets the compared samples; may be null.
  static grpc::ServerWriteReactor<v1::CompareEvent>* Start(grpc::CallbackServerContext* context,
                                                           v1::CompareRequest request,
                                                           std::shared_ptr<Upstreams> upstreams,
                                                           std::shared_ptr<History> history,
                                                           std::shared_ptr<Recording> recording,
                                                           HeldBytes memory, AdmitTokens admit);

 private:
  struct Sample {
    v1::TokenLogprobs rollout;  // until reported
    v1::TokenLogprobs scorer;   // until reported
    v1::GenerateComplete complete;
    bool completed = false;
    bool scored = false;
    SequenceOutcome outcome;  // set once scored
    size_t bytes = 0;         // of rollout and scorer
  };
  struct Prompt {
    std::vector<Sample> samples;  // empty until started
    size_t num_reported = 0;
  };
  // A compared sequence whose events the reader has not taken yet.
  struct Pending {
    size_t prompt;
    size_t sample;
    uint32_t next_position;  // the first token whose gap is not yet written
  };

  CompareSession(v1::CompareRequest request, SteadyTime deadline,
                 std::shared_ptr<Upstreams> upstreams, std::shared_ptr<History> history,
                 std::shared_ptr<Recording> recording, HeldBytes memory, AdmitTokens admit);

  void Begin();

  // gRPC threads call these. Each takes the lock.
  void OnInfos(const UpstreamInfos& infos);
  void OnGenerated(size_t prompt, const v1::GenerateResponse& response);
  void OnGenerateDone(size_t prompt, const absl::Status& status,
                      const std::shared_ptr<grpc::ClientContext>& call);
  void OnScored(size_t prompt, size_t sample, const v1::ScoreResponse& response);
  void OnScoreDone(size_t prompt, size_t sample, const absl::Status& status,
                   const std::shared_ptr<grpc::ClientContext>& call);
  void OnWritable();
  void OnCancel();

  // The caller of the methods below holds the lock.
  absl::Status CheckInfos(const UpstreamInfos& infos);
  absl::Status TakeGenerated(size_t prompt, const v1::GenerateResponse& response);
  absl::Status TakeScore(Sample& sample, const v1::ScoreResponse& response);
  // Counts the memory of `tokens`, which the sample keeps. RESOURCE_EXHAUSTED: it is too much.
  absl::Status Hold(Sample& sample, const v1::TokenLogprobs& tokens);
  void Release(Sample& sample);  // frees its tokens
  void StartPrompts();
  void StartGenerate(size_t prompt);
  void StartScore(size_t prompt, size_t sample);
  void Record(size_t prompt, size_t sample) const;
  void Conclude(size_t prompt, size_t sample);
  void Emit();
  bool EmitGaps(Pending& pending);
  bool EmitReport(const Pending& pending);
  bool Send(v1::CompareEvent event);
  v1::CompareSummary Summarize() const;
  void Fail(const absl::Status& status);

  std::string SequenceId(size_t prompt, size_t sample) const;

  const v1::CompareRequest request_;
  const SteadyTime deadline_;
  const std::shared_ptr<Upstreams> upstreams_;
  const std::shared_ptr<History> history_;
  const std::shared_ptr<Recording> recording_;
  const AdmitTokens admit_;
  const History::Comparison comparison_;
  std::shared_ptr<StreamWriter<v1::CompareEvent>> writer_;  // set before the first callback

  std::mutex mutex_;  // guards all below
  bool over_ = false;
  std::unordered_set<std::shared_ptr<grpc::ClientContext>> calls_;
  v1::SideIdentity rollout_;
  v1::SideIdentity scorer_;
  std::vector<Prompt> prompts_;
  size_t num_started_ = 0;
  size_t num_reported_ = 0;  // prompts whose samples are all reported
  std::deque<Pending> pending_;
  HeldBytes memory_;
  size_t bytes_;  // of the request, its samples and their tokens
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARE_SESSION_H_
