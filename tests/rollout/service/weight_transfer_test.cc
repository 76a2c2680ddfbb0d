// Weights that a trainer broadcasts, over the wire: they serve as those of a directory do, packed
// or not, in one call or several. Whatever trainer or client does wrong, the old weights serve on,
// and the next transfer works.
#include "rollout/service/weight_transfer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/parallel/tcp_broadcast.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
#include "tests/rollout/service/service_fixture.h"
#include "tests/support/loopback_peer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using absl::StatusCode;
using std::chrono::milliseconds;
using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TcpSender;
using Stub = v1::RolloutService::Stub;

// A tensor as a trainer has it.
struct Sent {
  v1::StreamedTensor listed;
  std::string bytes;
};
using Weights = std::vector<Sent>;

// Counts what a receiver has begun to wait for.
class Watched final : public WeightBroadcast {
 public:
  Watched(std::unique_ptr<WeightBroadcast> watched, std::atomic<int>& num_begun)
      : watched_(std::move(watched)), num_begun_(num_begun) {}

  absl::Status Reserve(size_t bytes) override { return watched_->Reserve(bytes); }
  absl::Status Begin(size_t bytes, milliseconds max_silence,
                     const std::function<absl::Status()>& check) override {
    ++num_begun_;
    return watched_->Begin(bytes, max_silence, check);
  }
  absl::Status Read(void* out, size_t bytes) override { return watched_->Read(out, bytes); }

 private:
  const std::unique_ptr<WeightBroadcast> watched_;
  std::atomic<int>& num_begun_;
};

class WeightTransferTest : public ServiceFixture {
 protected:
  void Start() {
    transfer_.join = [this](
                         const BroadcastGroup& group,
                         const PeerWait& wait) -> absl::StatusOr<std::unique_ptr<WeightBroadcast>> {
      ++num_begun_;
      ISOBIT_ASSIGN_OR_RETURN(auto joined, JoinTcpBroadcast(group, wait));
      return std::make_unique<Watched>(std::move(joined), num_begun_);
    };
    StartServer(DefaultOptions());
  }
  // Waits until the service has begun to wait for so many things of trainers.
  void AwaitBegun(int count) const {
    while (num_begun_ < count) std::this_thread::sleep_for(milliseconds(1));
  }

  // In bf16, of the weights of the directory v2, or of others.
  Weights Of(uint64_t seed = 2) const {
    const auto random = testing_support::RandomWeights(config_, seed);
    Weights weights;
    for (const ExpectedTensor& spec : ExpectedTensors(ModelPlan(config_))) {
      const std::vector<uint16_t>& values = random.tensors.at(spec.name);
      Sent& sent = weights.emplace_back();
      sent.listed.set_name(spec.name);
      sent.listed.set_dtype("BF16");
      sent.listed.mutable_shape()->Add(spec.shape.begin(), spec.shape.end());
      sent.bytes.assign(reinterpret_cast<const char*>(values.data()), 2 * values.size());
    }
    return weights;
  }
  // The same values as a trainer has them that keeps fp32.
  static void Widen(Weights& weights) {
    for (Sent& sent : weights) {
      std::string wide;
      for (size_t i = 0; i < sent.bytes.size(); i += 2)
        wide += std::string(2, '\0') + sent.bytes.substr(i, 2);
      sent.bytes = wide;
      sent.listed.set_dtype("F32");
    }
  }

  v1::InitWeightTransferRequest InitOf(const TcpSender& sender) const {
    v1::InitWeightTransferRequest init;
    init.set_nccl_unique_id(sender.id());
    init.set_rank_offset(1);
    init.set_world_size(2);
    if (packed_bytes_) {
      init.set_packed(true);
      init.set_packed_buffer_size_bytes(*packed_bytes_);
    }
    return init;
  }
  absl::Status Init(const v1::InitWeightTransferRequest& init) {
    v1::InitWeightTransferResponse response;
    return Call(&Stub::InitWeightTransfer, *stub_, init, response);
  }
  void Join(TcpSender& sender) {
    std::future<bool> joined = std::async(std::launch::async, [&] { return sender.Join(); });
    ISOBIT_ASSERT_OK(Init(InitOf(sender)));
    ASSERT_TRUE(joined.get());
  }
  absl::Status Open(const v1::StartWeightTransferRequest& start = {}) {
    v1::StartWeightTransferResponse response;
    return Call(&Stub::StartWeightTransfer, *stub_, start, response);
  }
  absl::Status Receive(const Weights& listed) {
    v1::ReceiveWeightsRequest request;
    for (const Sent& sent : listed) *request.add_tensors() = sent.listed;
    v1::ReceiveWeightsResponse response;
    const absl::Status status = Call(&Stub::ReceiveWeights, *stub_, request, response);
    num_bytes_ = response.num_bytes();
    return status;
  }
  absl::Status Finish(const std::string& expected_digest = "") {
    v1::FinishWeightTransferRequest request;
    request.set_expected_digest(expected_digest);
    return Call(&Stub::FinishWeightTransfer, *stub_, request, response_);
  }
  absl::Status Shutdown() {
    v1::ShutdownWeightTransferResponse response;
    return Call(&Stub::ShutdownWeightTransfer, *stub_, v1::ShutdownWeightTransferRequest(),
                response);
  }

  // Broadcasts as vLLM's trainer does.
  bool Broadcast(TcpSender& sender, const Weights& weights) const {
    std::string buffer;
    for (const Sent& sent : weights) {
      buffer += sent.bytes;
      if (packed_bytes_ && buffer.size() <= *packed_bytes_) continue;
      if (!sender.Broadcast(buffer)) return false;
      buffer.clear();
    }
    return buffer.empty() || sender.Broadcast(buffer);
  }
  // Broadcasts `weights` while the service receives what `listed` says.
  absl::Status Transfer(TcpSender& sender, const Weights& weights, const Weights& listed) {
    std::future<bool> sent =
        std::async(std::launch::async, [&] { return Broadcast(sender, weights); });
    absl::Status received = Receive(listed);
    if (!received.ok()) sender.Leave();
    sent.wait();
    return received;
  }
  absl::Status UpdateBy(TcpSender& sender, const Weights& weights) {
    absl::Status status = Open();
    if (status.ok()) status = Transfer(sender, weights, weights);
    if (status.ok()) status = Finish();
    return status;
  }

  absl::Status UpdateTo(const std::string& model) {
    v1::UpdateWeightsRequest request;
    request.set_model_path(model);
    return Call(&Stub::UpdateWeights, *stub_, request, response_);
  }
  std::vector<float> Logprobs() {
    const Generated generated = Generate(MakeProto());
    ISOBIT_EXPECT_OK(generated.status);
    const auto& logprobs = generated.tokens.at(0).logprobs();
    return {logprobs.begin(), logprobs.end()};
  }
  uint64_t Serving() {
    v1::RolloutServerInfo info;
    ISOBIT_EXPECT_OK(Call(&Stub::GetServerInfo, *stub_, v1::GetServerInfoRequest(), info));
    return info.server().weight_version().id();
  }
  // That the old weights serve, no update is in progress, and a transfer works.
  void ExpectUnharmed(const std::vector<float>& before) {
    EXPECT_EQ(Logprobs(), before);
    TcpSender sender;
    Join(sender);
    ISOBIT_EXPECT_OK(UpdateBy(sender, Of()));
    EXPECT_NE(Logprobs(), before);
    ISOBIT_EXPECT_OK(UpdateTo("v1"));
  }

  std::atomic<int> num_begun_{0};
  std::optional<uint64_t> packed_bytes_;
  uint64_t num_bytes_ = 0;
  v1::UpdateWeightsResponse response_;
};

TEST_F(WeightTransferTest, ServesAsADirectoryDoes) {
  Start();
  const std::vector<float> first = Logprobs();
  ISOBIT_ASSERT_OK(UpdateTo("v2"));
  const std::string digest = response_.current().digest();
  const std::vector<float> expected = Logprobs();
  EXPECT_NE(expected, first);
  size_t all_bytes = 0;
  for (const Sent& sent : Of()) all_bytes += sent.bytes.size();
  for (const std::optional<uint64_t> packed :
       {std::optional<uint64_t>(), std::optional<uint64_t>(0), std::optional<uint64_t>(1000),
        std::optional<uint64_t>(uint64_t{1} << 40)}) {
    for (const bool is_wide : {false, true}) {
      ISOBIT_ASSERT_OK(UpdateTo("v1"));
      packed_bytes_ = packed;
      Weights weights = Of();
      if (is_wide) Widen(weights);
      TcpSender sender;
      Join(sender);
      for (int round = 0; round < 2; ++round) {
        ISOBIT_ASSERT_OK(Open());
        // The second time, the service knows the list.
        ISOBIT_ASSERT_OK(Transfer(sender, weights, round == 0 ? weights : Weights()));
        EXPECT_EQ(num_bytes_, is_wide ? 2 * all_bytes : all_bytes);
        ISOBIT_ASSERT_OK(Finish(digest));
        EXPECT_EQ(response_.current().digest(), digest);
        EXPECT_EQ(Serving(), response_.current().id());
        EXPECT_EQ(Logprobs(), expected) << packed.value_or(7) << is_wide;
      }
    }
  }
}

TEST_F(WeightTransferTest, TensorsMayComeInSeveralCalls) {
  Start();
  ISOBIT_ASSERT_OK(UpdateTo("v2"));
  const std::vector<float> expected = Logprobs();
  ISOBIT_ASSERT_OK(UpdateTo("v1"));
  Weights weights = Of();
  std::reverse(weights.begin(), weights.end());
  TcpSender sender;
  Join(sender);
  ISOBIT_ASSERT_OK(Open());
  for (const Sent& one : weights) ISOBIT_ASSERT_OK(Transfer(sender, {one}, {one}));
  ISOBIT_ASSERT_OK(Finish());
  EXPECT_EQ(Logprobs(), expected);
  // One left out is missed at the end, by name.
  ISOBIT_ASSERT_OK(Open());
  for (size_t i = 1; i < weights.size(); ++i) {
    ISOBIT_ASSERT_OK(Transfer(sender, {weights[i]}, {weights[i]}));
  }
  EXPECT_THAT(Finish(), StatusIs(StatusCode::kInvalidArgument,
                                 HasSubstr(weights[0].listed.name() + "\": 0 of its ")));
  EXPECT_EQ(Logprobs(), expected);
  // The group lives on.
  ISOBIT_ASSERT_OK(UpdateBy(sender, Of(3)));
  EXPECT_NE(Logprobs(), expected);
}

TEST_F(WeightTransferTest, DoesWithRequestsInFlightAsTold) {
  Start();
  TcpSender sender;
  Join(sender);
  for (const v1::InFlightMode mode :
       {v1::IN_FLIGHT_MODE_ABORT, v1::IN_FLIGHT_MODE_WAIT, v1::IN_FLIGHT_MODE_RECOMPUTE_KV}) {
    grpc::ClientContext context;
    const auto reader = stub_->Generate(&context, MakeLongProto("r"));
    ReadFirstToken(*reader);
    const uint64_t before = Serving();
    v1::StartWeightTransferRequest start;
    start.set_in_flight_mode(mode);
    start.set_weight_version(before + 10);
    const Weights weights = Of(2 + static_cast<uint64_t>(mode));
    ISOBIT_ASSERT_OK(Open(start));
    ISOBIT_ASSERT_OK(Transfer(sender, weights, weights));
    ISOBIT_ASSERT_OK(Finish());
    EXPECT_EQ(Serving(), before + 10);
    Generated generated;
    ReadAll(*reader, context, generated);
    ISOBIT_ASSERT_OK(generated.status);
    EXPECT_EQ(response_.num_aborted(), mode == v1::IN_FLIGHT_MODE_ABORT ? 1u : 0u) << mode;
    EXPECT_EQ(response_.num_recomputed(), mode == v1::IN_FLIGHT_MODE_RECOMPUTE_KV ? 1u : 0u);
  }
}

TEST_F(WeightTransferTest, EachFaultHasItsErrorAndTheOldWeightsServeOn) {
  Start();
  const std::vector<float> before = Logprobs();
  const char kTensor[] = "model.layers.0.input_layernorm.weight";
  const struct {
    const char* what;
    std::function<void(v1::StreamedTensor&)> spoil;  // of the list alone
    std::vector<std::string> told;
  } kCases[] = {
      {"an unknown tensor", [](auto& t) { t.set_name("x"); }, {"unexpected tensors: \"x\""}},
      {"another shape", [](auto& t) { t.set_shape(0, 3); }, {kTensor, " is [3]"}},
      {"an endless shape", [](auto& t) { t.set_shape(0, UINT64_MAX); }, {kTensor, "negative"}},
      {"another dtype", [](auto& t) { t.set_dtype("I8"); }, {kTensor, "expected BF16, F16 or F32"}},
      {"fp16", [](auto& t) { t.set_dtype("F16"); }, {"--round_fp16_weights"}},
      {"another size", [](auto& t) { t.set_dtype("F32"); }, {"the trainer broadcasts "}},
  };
  for (const auto& one : kCases) {
    TcpSender sender;
    Join(sender);
    ISOBIT_ASSERT_OK(Open());
    const Weights weights = Of();
    Weights listed = weights;
    for (Sent& sent : listed) {
      if (sent.listed.name() == kTensor) one.spoil(sent.listed);
    }
    const absl::Status status = Transfer(sender, weights, listed);
    EXPECT_THAT(status, StatusIs(StatusCode::kInvalidArgument)) << one.what;
    for (const std::string& text : one.told) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(text)) << one.what;
    }
    EXPECT_THAT(Finish(), StatusIs(StatusCode::kFailedPrecondition)) << one.what;
    EXPECT_EQ(Serving(), 1u) << one.what;
    EXPECT_EQ(Logprobs(), before) << one.what;
  }
  ExpectUnharmed(before);
}

TEST_F(WeightTransferTest, ATensorComesOnceInAnUpdate) {
  Start();
  const std::vector<float> before = Logprobs();
  const Weights weights = Of();
  for (const bool in_one_call : {true, false}) {
    TcpSender sender;
    Join(sender);
    ISOBIT_ASSERT_OK(Open());
    if (in_one_call) {
      EXPECT_THAT(Receive({weights[0], weights[0]}),
                  StatusIs(StatusCode::kInvalidArgument, HasSubstr("twice")));
      continue;
    }
    ISOBIT_ASSERT_OK(Transfer(sender, {weights[0]}, {weights[0]}));
    Sent wide = weights[1];
    wide.listed.set_dtype("F32");
    EXPECT_THAT(Receive({weights[1], weights[0]}),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr("got twice")));
    TcpSender again;
    Join(again);
    ISOBIT_ASSERT_OK(Open());
    ISOBIT_ASSERT_OK(Transfer(again, {weights[0]}, {weights[0]}));
    EXPECT_THAT(Receive({wide}),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr("expected BF16 ")));
  }
  ExpectUnharmed(before);
}

TEST_F(WeightTransferTest, ChecksTheDigestAndItsOwnFinish) {
  Start();
  const std::vector<float> before = Logprobs();
  TcpSender sender;
  Join(sender);
  const Weights weights = Of();
  ISOBIT_ASSERT_OK(Open());
  ISOBIT_ASSERT_OK(Transfer(sender, weights, weights));
  EXPECT_THAT(Finish("00"),
              StatusIs(StatusCode::kFailedPrecondition, HasSubstr("the weights have digest ")));
  EXPECT_THAT(Finish(), StatusIs(StatusCode::kFailedPrecondition, HasSubstr("no update is open")));
  ISOBIT_ASSERT_OK(Open());
  EXPECT_THAT(Finish(),
              StatusIs(StatusCode::kFailedPrecondition, HasSubstr("nothing was received")));
  Weights spoiled = weights;
  spoiled[3].bytes[1] = '\x7f';  // not a number
  spoiled[3].bytes[0] = '\xc1';
  ISOBIT_ASSERT_OK(Open());
  ISOBIT_ASSERT_OK(Transfer(sender, spoiled, spoiled));
  EXPECT_FALSE(Finish().ok());
  EXPECT_EQ(Logprobs(), before);
  ISOBIT_EXPECT_OK(UpdateBy(sender, weights));
  EXPECT_NE(Logprobs(), before);
}

TEST_F(WeightTransferTest, CallsOutOfOrderAreRefused) {
  Start();
  EXPECT_THAT(Open(), StatusIs(StatusCode::kFailedPrecondition, HasSubstr("InitWeightTransfer")));
  EXPECT_THAT(Receive(Of()),
              StatusIs(StatusCode::kFailedPrecondition, HasSubstr("InitWeightTransfer")));
  EXPECT_THAT(Finish(), StatusIs(StatusCode::kFailedPrecondition));
  ISOBIT_EXPECT_OK(Shutdown());
  TcpSender sender;
  Join(sender);
  ISOBIT_ASSERT_OK(Open());
  EXPECT_THAT(Receive({}), StatusIs(StatusCode::kInvalidArgument, HasSubstr("expected some")));
  v1::StartWeightTransferRequest start;
  start.set_in_flight_mode(static_cast<v1::InFlightMode>(9));
  EXPECT_THAT(Open(start), StatusIs(StatusCode::kInvalidArgument, HasSubstr("in_flight_mode")));
}

TEST_F(WeightTransferTest, FieldsOfTheGroupAreChecked) {
  Start();
  const struct {
    std::function<void(v1::InitWeightTransferRequest&)> spoil;
    StatusCode code;
    const char* told;
  } kCases[] = {
      {[](auto& i) { i.clear_nccl_unique_id(); }, StatusCode::kInvalidArgument, "got neither"},
      {[](auto& i) { i.set_master_port(1); }, StatusCode::kInvalidArgument, "got both"},
      {[](auto& i) { i.set_nccl_unique_id("short"); }, StatusCode::kInvalidArgument,
       "nccl_unique_id: expected 128 bytes, got 5"},
      {[](auto& i) {
         i.clear_nccl_unique_id();
         i.set_master_address("localhost");
         i.set_master_port(65536);
       },
       StatusCode::kInvalidArgument, "master_port: expected 1 to 65535, got 65536"},
      {[](auto& i) { i.set_rank_offset(0); }, StatusCode::kInvalidArgument, "rank_offset"},
      {[](auto& i) { i.set_rank_offset(2); }, StatusCode::kInvalidArgument, "rank_offset"},
      {[](auto& i) { i.set_world_size(1); }, StatusCode::kInvalidArgument, "world_size"},
      {[](auto& i) { i.set_world_size(UINT32_MAX); }, StatusCode::kInvalidArgument, "world_size"},
      {[](auto& i) { i.set_nccl_unique_id(std::string(128, 'x')); },
       StatusCode::kFailedPrecondition, "has no NCCL"},
      {[](auto& i) { i.mutable_nccl_unique_id()->back() = 'x'; }, StatusCode::kInvalidArgument,
       "HOST:PORT"},
  };
  for (const auto& one : kCases) {
    v1::InitWeightTransferRequest init = InitOf(TcpSender());
    one.spoil(init);
    EXPECT_THAT(Init(init), StatusIs(one.code, HasSubstr(one.told))) << one.told;
  }
}

TEST_F(WeightTransferTest, ATrainerThatDiesOrIsSilentLeavesTheOldWeights) {
  weight_stream_.max_silence = milliseconds(1000);
  Start();
  const std::vector<float> before = Logprobs();
  const Weights weights = Of();
  const std::vector<std::pair<const char*, std::function<void(TcpSender&)>>> kTrainers = {
      {"gone at once", [](TcpSender& sender) { sender.Leave(); }},
      {"gone within a tensor",
       [&](TcpSender& sender) {
         sender.Say(testing_support::Raw<uint64_t>(weights[0].bytes.size()));
         sender.Say(weights[0].bytes.substr(0, 10));
         sender.Leave();
       }},
      {"silent at once", [](TcpSender& sender) { sender.AwaitEnd(); }},
      {"silent within a tensor",
       [&](TcpSender& sender) {
         sender.Say(testing_support::Raw<uint64_t>(weights[0].bytes.size()));
         sender.Say(weights[0].bytes.substr(0, 10));
         sender.AwaitEnd();
       }},
      {"a length that lies",
       [](TcpSender& sender) {
         sender.Say(testing_support::Raw<uint64_t>(UINT64_MAX));
         sender.AwaitEnd();
       }},
  };
  for (const auto& [what, does] : kTrainers) {
    TcpSender sender;
    Join(sender);
    ISOBIT_ASSERT_OK(Open());
    std::future<void> sends =
        std::async(std::launch::async, [&sender, &act = does] { act(sender); });
    const absl::Status status = Receive(weights);
    EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
                absl::IsInvalidArgument(status))
        << what << ": " << status;
    sends.get();
    EXPECT_THAT(Finish(), StatusIs(StatusCode::kFailedPrecondition)) << what;
    EXPECT_EQ(Logprobs(), before) << what;
  }
  // A client that never finishes: the update ends by itself, and others can begin one.
  TcpSender sender;
  Join(sender);
  ISOBIT_ASSERT_OK(Open());
  ISOBIT_ASSERT_OK(Transfer(sender, weights, weights));
  absl::Status status = UpdateTo("v1");
  while (absl::IsAborted(status)) {
    std::this_thread::sleep_for(milliseconds(20));
    status = UpdateTo("v1");
  }
  ISOBIT_EXPECT_OK(status);
  EXPECT_THAT(Finish(), StatusIs(StatusCode::kDeadlineExceeded, HasSubstr("silent")));
  ExpectUnharmed(before);
}

TEST_F(WeightTransferTest, AClientThatGoesLeavesTheOldWeights) {
  Start();
  const std::vector<float> before = Logprobs();
  const Weights weights = Of();
  {
    // While it joins.
    const TcpSender sender;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + milliseconds(100));
    v1::InitWeightTransferResponse response;
    EXPECT_EQ(stub_->InitWeightTransfer(&context, InitOf(sender), &response).error_code(),
              grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  {
    // While it receives: the trainer sees its end of the group.
    TcpSender sender;
    Join(sender);
    ISOBIT_ASSERT_OK(Open());
    const int begun = num_begun_;
    grpc::ClientContext context;
    v1::ReceiveWeightsRequest request;
    for (const Sent& sent : weights) *request.add_tensors() = sent.listed;
    v1::ReceiveWeightsResponse response;
    std::future<grpc::StatusCode> received = std::async(std::launch::async, [&] {
      return stub_->ReceiveWeights(&context, request, &response).error_code();
    });
    ASSERT_TRUE(sender.Broadcast(weights[0].bytes));
    AwaitBegun(begun + 2);  // the second tensor, which does not come
    context.TryCancel();
    EXPECT_EQ(received.get(), grpc::StatusCode::CANCELLED);
    sender.AwaitEnd();
  }
  ExpectUnharmed(before);
}

// A client that tries again after its deadline need not know how long the service takes to see it.
TEST_F(WeightTransferTest, ACallWaitsForOneWhoseClientHasGone) {
  std::promise<void> joins;
  std::promise<void> may_end;
  WeightTransfer::Service service{};
  service.wake = [] {};
  WeightTransferOptions options;
  options.join = [&](const BroadcastGroup&, const PeerWait&) {
    joins.set_value();
    may_end.get_future().wait();
    return absl::CancelledError("gone");
  };
  WeightTransfer transfer(std::move(service), std::move(options));
  std::atomic<bool> is_gone{false};
  std::promise<absl::Status> first;
  transfer.Init({}, {[&] { return is_gone.load(); },
                     [&](const absl::Status& status) { first.set_value(status); }});
  joins.get_future().wait();
  const auto start = [&] {
    auto answer = std::make_shared<std::promise<absl::Status>>();
    transfer.Start({}, {[] { return false; },
                        [answer](const absl::Status& status) { answer->set_value(status); }});
    return answer->get_future();
  };
  EXPECT_THAT(start().get(), StatusIs(StatusCode::kAborted));
  is_gone = true;
  std::future<absl::Status> waits = start();
  may_end.set_value();
  EXPECT_THAT(first.get_future().get(), StatusIs(StatusCode::kCancelled));
  EXPECT_THAT(waits.get(), StatusIs(StatusCode::kFailedPrecondition));
}

TEST_F(WeightTransferTest, ASecondInitBeginsAnew) {
  Start();
  const std::vector<float> before = Logprobs();
  const Weights weights = Of();
  // It ends one that waits.
  const TcpSender lost;
  std::future<absl::Status> first =
      std::async(std::launch::async, [&] { return Init(InitOf(lost)); });
  AwaitBegun(1);
  EXPECT_THAT(Open(), StatusIs(StatusCode::kAborted, HasSubstr("is in progress")));
  TcpSender sender;
  Join(sender);
  EXPECT_THAT(first.get(), StatusIs(StatusCode::kAborted));
  // It drops an update that has all its bytes.
  ISOBIT_ASSERT_OK(Open());
  ISOBIT_ASSERT_OK(Transfer(sender, weights, weights));
  TcpSender next;
  Join(next);
  sender.AwaitEnd();
  EXPECT_THAT(Finish(), StatusIs(StatusCode::kFailedPrecondition));
  EXPECT_EQ(Logprobs(), before);
  // So does a second start, and a shutdown.
  ISOBIT_ASSERT_OK(Open());
  ISOBIT_ASSERT_OK(Transfer(next, {weights[0]}, {weights[0]}));
  ISOBIT_ASSERT_OK(Open());
  EXPECT_THAT(Finish(), StatusIs(StatusCode::kFailedPrecondition));
  ISOBIT_ASSERT_OK(Open());
  ISOBIT_ASSERT_OK(Transfer(next, weights, weights));
  ISOBIT_ASSERT_OK(Shutdown());
  next.AwaitEnd();
  EXPECT_THAT(Finish(), StatusIs(StatusCode::kFailedPrecondition));
  ExpectUnharmed(before);
}

TEST_F(WeightTransferTest, OneUpdateAtATime) {
  Start();
  TcpSender sender;
  Join(sender);
  const Weights weights = Of();
  ISOBIT_ASSERT_OK(Open());
  ISOBIT_ASSERT_OK(Transfer(sender, {weights[0]}, {weights[0]}));
  EXPECT_THAT(UpdateTo("v2"), StatusIs(StatusCode::kAborted));
  Weights rest = weights;
  rest.erase(rest.begin());
  ISOBIT_ASSERT_OK(Transfer(sender, rest, rest));
  ISOBIT_ASSERT_OK(Finish());
  EXPECT_EQ(Serving(), 2u);
  v1::StartWeightTransferRequest old;
  old.set_weight_version(2);
  ISOBIT_ASSERT_OK(Open(old));
  EXPECT_THAT(Transfer(sender, weights, weights),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("weight_version: expected more")));
}

TEST_F(WeightTransferTest, TheServiceEndsWhileATransferRuns) {
  Start();
  auto sender = std::make_unique<TcpSender>();
  Join(*sender);
  ISOBIT_ASSERT_OK(Open());
  const int begun = num_begun_;
  std::future<absl::Status> received =
      std::async(std::launch::async, [&] { return Receive(Of()); });
  ASSERT_TRUE(sender->Broadcast(Of()[0].bytes));
  AwaitBegun(begun + 2);
  service_->BeginDrain();
  EXPECT_FALSE(received.get().ok());
  EXPECT_THAT(Open(), StatusIs(StatusCode::kUnavailable));
}

TEST_F(WeightTransferTest, AServiceWithoutBroadcastsSaysSo) {
  StartServer(DefaultOptions());
  EXPECT_THAT(Init(InitOf(TcpSender())), StatusIs(StatusCode::kUnimplemented));
}

}  // namespace
}  // namespace isobit
