// Admin calls whose deadline passes or whose client goes away before they take effect, over real
// connections: they have no effect at all.
#include <grpcpp/client_context.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/rollout/service/service_fixture.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::Each;
using Stub = v1::RolloutService::Stub;

// Holds up the steps of all ranks while it is closed.
class StepGate {
 public:
  void Pass() {
    std::unique_lock lock(mutex_);
    ++num_held_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --num_held_;
  }
  // Waits until a step is held up.
  void Close() {
    std::unique_lock lock(mutex_);
    open_ = false;
    changed_.wait(lock, [this] { return num_held_ > 0; });
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int num_held_ = 0;
};

class GatedOps final : public testing_support::ForwardingBackend {
 public:
  explicit GatedOps(StepGate& gate) : ForwardingBackend(MakeCpuBackend({})), gate_(gate) {
    Replace<EmbeddingArgs>(*this);
  }
  absl::Status On(const EmbeddingArgs& args) {
    gate_.Pass();
    return inner().Run(args);
  }

 private:
  StepGate& gate_;
};

enum class Leaves { kByDeadline, kByCancel };

class ControlCallsTest : public ServiceFixture, public testing::WithParamInterface<Leaves> {
 protected:
  // Starts a request, makes `call(context)` while a step is held up, lets the caller leave, and
  // releases the step. The request must end as if the call had not been made.
  template <typename Call>
  void ExpectNoTraceOf(const Call& call) {
    grpc::ClientContext request_context;
    request_context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    const auto reader = stub_->Generate(&request_context, MakeLongProto("r"));
    ReadFirstToken(*reader);
    gate_.Close();
    grpc::ClientContext context;
    std::thread leaver;
    if (GetParam() == Leaves::kByDeadline) {
      context.set_deadline(std::chrono::system_clock::now() + kPatience);
    } else {
      leaver = std::thread([&] {
        std::this_thread::sleep_for(kPatience);
        context.TryCancel();
      });
    }
    const grpc::Status status = call(&context);
    if (leaver.joinable()) leaver.join();
    EXPECT_EQ(status.error_code(), GetParam() == Leaves::kByDeadline
                                       ? grpc::StatusCode::DEADLINE_EXCEEDED
                                       : grpc::StatusCode::CANCELLED);
    // Until the server has noticed: GetLoad comes behind the cancellation on the same connection.
    EXPECT_FALSE(GetLoad().paused());
    std::this_thread::sleep_for(kPatience);
    gate_.Open();
    Generated generated;
    ReadAll(*reader, request_context, generated);
    ISOBIT_EXPECT_OK(generated.status);
    EXPECT_EQ(generated.complete[0].finish_reason(), v1::FINISH_REASON_LENGTH)
        << generated.complete[0].abort_reason();
    EXPECT_THAT(generated.tokens[0].weight_versions(), Each(1u));
    EXPECT_FALSE(GetLoad().paused());
    EXPECT_EQ(engine_->weight_version()->id, 1u);
    // In case the test fails and generation is paused.
    ISOBIT_EXPECT_OK(engine_->Continue());
    EXPECT_THAT(Generate(MakeProto("after")).tokens[0].weight_versions(), Each(1u));
  }

  void StartGatedServer() {
    EngineOptions options = DefaultOptions();
    options.runner.make_rank = RankOf([this] { return std::make_unique<GatedOps>(gate_); });
    StartServer(options);
  }

  static constexpr std::chrono::milliseconds kPatience{300};
  StepGate gate_;
};
INSTANTIATE_TEST_SUITE_P(Leaves, ControlCallsTest,
                         testing::Values(Leaves::kByDeadline, Leaves::kByCancel),
                         [](const auto& param) {
                           return param.param == Leaves::kByDeadline ? "Deadline" : "Cancel";
                         });

TEST_P(ControlCallsTest, APauseEndsWithItsCall) {
  StartGatedServer();
  for (const v1::PauseMode mode :
       {v1::PAUSE_MODE_ABORT, v1::PAUSE_MODE_WAIT, v1::PAUSE_MODE_KEEP}) {
    SCOPED_TRACE(v1::PauseMode_Name(mode));
    ExpectNoTraceOf([&](grpc::ClientContext* context) {
      v1::PauseGenerationRequest request;
      request.set_mode(mode);
      v1::PauseGenerationResponse response;
      return stub_->PauseGeneration(context, request, &response);
    });
  }
}

TEST_P(ControlCallsTest, AnUpdateEndsWithItsCall) {
  StartGatedServer();
  for (const v1::InFlightMode mode :
       {v1::IN_FLIGHT_MODE_ABORT, v1::IN_FLIGHT_MODE_WAIT, v1::IN_FLIGHT_MODE_RECOMPUTE_KV}) {
    SCOPED_TRACE(v1::InFlightMode_Name(mode));
    ExpectNoTraceOf([&](grpc::ClientContext* context) {
      v1::UpdateWeightsRequest request;
      request.set_model_path("v2");
      request.set_in_flight_mode(mode);
      v1::UpdateWeightsResponse response;
      return stub_->UpdateWeights(context, request, &response);
    });
  }
  v1::UpdateWeightsRequest request;
  request.set_model_path("v2");
  v1::UpdateWeightsResponse response;
  ISOBIT_EXPECT_OK(Call(&Stub::UpdateWeights, *stub_, request, response));
  EXPECT_EQ(response.current().id(), 2u) << "nothing is left of those before";
}

}  // namespace
}  // namespace isobit
