// The scorer's gRPC service: a handler checks the request, passes it to the engine (scorer.h) and
// returns.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_SERVICE_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_SERVICE_H_

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "common/access/call_gate.h"
#include "common/access/held_bytes.h"
#include "isobit/v1/scorer.grpc.pb.h"
#include "trainer_bridge/scorer/score_messages.h"
#include "trainer_bridge/scorer/scorer.h"
#include "trainer_bridge/scorer/scorer_metrics.h"

namespace isobit {

// Must outlive the gRPC server with which it is registered.
class ScorerService final : public v1::ScorerService::CallbackService {
 public:
  struct Options {
    size_t max_sequences = ScoreLimits().max_sequences;
    uint32_t max_logprobs = ScoreLimits().max_logprobs;
    size_t max_queued_bytes = 4 << 20;  // of one stream's results, beyond those of one batch
    ByteLimits memory{.total = 1 << 30, .client_share = 0.5};  // that Score calls hold
    WeightStreamLimits weight_stream{};
  };

  explicit ScorerService(const Options& options,
                         std::shared_ptr<CallGate> gate = CallGate::Create(),
                         std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>());
  ~ScorerService() override;

  // Starts serving; until then every call fails with UNAVAILABLE. Call it once.
  void SetScorer(std::unique_ptr<Scorer> scorer);

  // Refuses new calls except GetServerInfo with UNAVAILABLE; calls in flight go on.
  void BeginDrain();

  // Ends the scorer and its jobs. Call it only after the gRPC server has shut down.
  void Stop();

  grpc::ServerWriteReactor<v1::ScoreResponse>* Score(grpc::CallbackServerContext* context,
                                                     const v1::ScoreRequest* request) override;
  grpc::ServerUnaryReactor* UpdateWeights(grpc::CallbackServerContext* context,
                                          const v1::UpdateWeightsRequest* request,
                                          v1::UpdateWeightsResponse* response) override;
  grpc::ServerReadReactor<v1::WeightChunk>* UpdateWeightsFromStream(
      grpc::CallbackServerContext* context, v1::UpdateWeightsResponse* response) override;
  grpc::ServerUnaryReactor* Probe(grpc::CallbackServerContext* context,
                                  const v1::ProbeRequest* request,
                                  v1::ProbeResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::ScorerServerInfo* info) override;

 private:
  // UNAVAILABLE: the service is still loading, or is draining.
  absl::StatusOr<Scorer*> Available();
  // Charges the client's quota for `request`.
  absl::Status Admit(const grpc::CallbackServerContext& context, const v1::ScoreRequest& request);
  // Parses and queues a request whose stream is open.
  absl::Status Submit(const v1::ScoreRequest& request,
                      const std::shared_ptr<class ScoreCall>& call);
  // Carries out `update` on a thread of its own, fills `response`, then calls `answer`.
  void Update(Scorer& scorer, WeightUpdate update, v1::UpdateWeightsResponse* response,
              std::function<void(const absl::Status&)> answer);
  // Runs `work`, which blocks, on a thread of its own.
  void RunApart(std::function<void()> work);

  const Options options_;
  const std::shared_ptr<ByteBudget> memory_;
  const std::shared_ptr<CallGate> gate_;
  const std::shared_ptr<Metrics> registry_;
  const ScorerMetrics metrics_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();

  std::mutex mutex_;  // guards what follows
  std::unique_ptr<Scorer> scorer_;
  Observations observations_;  // of scorer_
  ScoreLimits limits_;
  v1::Fingerprint fingerprint_;
  bool draining_ = false;
  std::vector<std::future<void>> apart_;  // updates and probes; each has a thread, since they block
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_SERVICE_H_
