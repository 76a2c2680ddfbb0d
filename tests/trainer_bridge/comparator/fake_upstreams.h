// A fake rollout and a fake scorer of one made-up model, on real loopback ports, with the faults
// that a test asks for. Both compute logprobs by the same function, so they agree by default.
#ifndef ISOBIT_TESTS_TRAINER_BRIDGE_COMPARATOR_FAKE_UPSTREAMS_H_
#define ISOBIT_TESTS_TRAINER_BRIDGE_COMPARATOR_FAKE_UPSTREAMS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "common/rpc/server_runner.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "isobit/v1/scorer.grpc.pb.h"

namespace isobit::testing_support {

// The model's logprob of `token` at `position` of the completion.
float FakeLogprob(uint32_t position, uint32_t token);

v1::ServerInfo FakeServerInfo();

// Samples n completions of max_tokens tokens, one chunk a token: token = prompt[0] + index +
// position.
class FakeRollout final : public v1::RolloutService::CallbackService {
 public:
  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::RolloutServerInfo* info) override;

  v1::ServerInfo info = FakeServerInfo();
  uint64_t token_weight_version = 1;  // of the tokens; `info` stays
  // Changes a logprob.
  std::function<float(uint32_t position, float logprob)> perturb;
  absl::Status failure;   // Generate ends with it after one chunk, unless OK
  bool hang = false;      // Generate sends one chunk and never ends
  bool truncate = false;  // Generate ends without completing any sample
  std::atomic<int> num_generates{0};
  std::atomic<int> num_cancelled{0};
};

// Scores the given tokens.
class FakeScorer final : public v1::ScorerService::CallbackService {
 public:
  grpc::ServerWriteReactor<v1::ScoreResponse>* Score(grpc::CallbackServerContext* context,
                                                     const v1::ScoreRequest* request) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::ScorerServerInfo* info) override;

  v1::ServerInfo info = FakeServerInfo();
  // Changes a logprob.
  std::function<float(const std::string& sequence_id, uint32_t position, float logprob)> perturb;
  std::function<void(v1::ScoreResponse&)> mutate;  // changes a whole result
  absl::Status failure;                            // Score ends with it at once, unless OK
  bool hang = false;                               // Score never ends
  bool hang_first = false;                         // the first Score never ends
  bool linger = false;                             // Score sends its results and never ends
  std::atomic<int> num_scores{0};
  std::atomic<int> num_cancelled{0};
};

// Serves `service` on a loopback port during its lifetime.
class FakeServer {
 public:
  // gate: admits callers; null: everybody may call.
  FakeServer(grpc::Service* service, const std::string& full_name,
             std::shared_ptr<CallGate> gate = nullptr);
  std::string address() const { return "127.0.0.1:" + std::to_string(runner_.port()); }

 private:
  ServerRunner runner_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_TRAINER_BRIDGE_COMPARATOR_FAKE_UPSTREAMS_H_
