// Weights that come by stream, over the wire: they serve as those of a directory do, and whatever a
// sender does wrong, the old weights serve on and the next stream works.
#include "common/rpc/weight_stream.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rollout/service/service_fixture.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"
#include "tests/support/weight_messages.h"

namespace isobit {
namespace {

using absl::StatusCode;
using testing::AllOf;
using testing::HasSubstr;
using testing_support::StatusIs;
using Stub = v1::RolloutService::Stub;
using Messages = std::vector<v1::WeightChunk>;

class WeightStreamTest : public ServiceFixture {
 protected:
  void Start() { StartServer(DefaultOptions()); }

  // Of the weights of the directory v2, or of others.
  Messages Of(uint64_t seed = 2, size_t longest = 1000) const {
    return testing_support::MessagesOf(config_, testing_support::RandomWeights(config_, seed),
                                       longest);
  }
  absl::Status Send(const Messages& messages) {
    return testing_support::Send(*stub_, messages, response_);
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
  v1::WeightVersion Serving() {
    v1::RolloutServerInfo info;
    ISOBIT_EXPECT_OK(Call(&Stub::GetServerInfo, *stub_, v1::GetServerInfoRequest(), info));
    return info.server().weight_version();
  }
  // The piece of that tensor that begins at `offset`.
  static v1::WeightChunk& PieceOf(Messages& messages, const std::string& name, size_t offset = 0) {
    for (v1::WeightChunk& message : messages) {
      const auto& tensors = messages[0].begin().tensors();
      if (message.has_piece() && message.piece().offset() == offset &&
          tensors[static_cast<int>(message.piece().tensor())].name() == name) {
        return message;
      }
    }
    ADD_FAILURE() << "no piece of " << name << " at " << offset;
    return messages[0];
  }

  v1::UpdateWeightsResponse response_;
  std::string digest_of_v2_;
};

TEST_F(WeightStreamTest, ServesAsADirectoryDoes) {
  Start();
  const std::vector<float> first = Logprobs();
  ISOBIT_ASSERT_OK(UpdateTo("v2"));
  const std::string digest = response_.current().digest();
  const std::vector<float> expected = Logprobs();
  EXPECT_NE(expected, first);
  std::mt19937 random(1);
  for (const size_t longest : {size_t{501}, size_t{1} << 20}) {
    for (const bool in_order : {true, false}) {
      ISOBIT_ASSERT_OK(UpdateTo("v1"));
      Messages messages = Of(2, longest);
      if (!in_order) std::shuffle(messages.begin() + 1, messages.end() - 1, random);
      messages.back().mutable_end()->set_expected_digest(digest);
      ISOBIT_ASSERT_OK(Send(messages));
      EXPECT_EQ(response_.current().digest(), digest);
      EXPECT_EQ(Serving().id(), response_.current().id());
      EXPECT_EQ(Logprobs(), expected) << longest;
    }
  }
}

TEST_F(WeightStreamTest, DoesWithRequestsInFlightAsTold) {
  Start();
  for (const v1::InFlightMode mode :
       {v1::IN_FLIGHT_MODE_ABORT, v1::IN_FLIGHT_MODE_WAIT, v1::IN_FLIGHT_MODE_RECOMPUTE_KV}) {
    grpc::ClientContext context;
    const auto reader = stub_->Generate(&context, MakeLongProto("r"));
    ReadFirstToken(*reader);
    const uint64_t before = Serving().id();
    Messages messages = Of(2 + static_cast<uint64_t>(mode));
    messages[0].mutable_begin()->set_in_flight_mode(mode);
    messages[0].mutable_begin()->set_weight_version(before + 10);
    ISOBIT_ASSERT_OK(Send(messages));
    EXPECT_EQ(Serving().id(), before + 10);
    Generated generated;
    ReadAll(*reader, context, generated);
    ISOBIT_ASSERT_OK(generated.status);
    const bool aborts = mode == v1::IN_FLIGHT_MODE_ABORT;
    const bool recomputes = mode == v1::IN_FLIGHT_MODE_RECOMPUTE_KV;
    EXPECT_EQ(response_.num_aborted(), aborts ? 1u : 0u) << mode;
    EXPECT_EQ(response_.num_recomputed(), recomputes ? 1u : 0u) << mode;
    EXPECT_EQ(generated.complete.at(0).finish_reason() == v1::FINISH_REASON_ABORT, aborts) << mode;
    EXPECT_EQ(generated.complete.at(0).weight_version().id(), recomputes ? before + 10 : before);
  }
}

TEST_F(WeightStreamTest, WakesARolloutWhoseWeightsWereGivenBack) {
  Start();
  ISOBIT_ASSERT_OK(UpdateTo("v2"));
  const std::vector<float> expected = Logprobs();
  v1::SleepRequest sleep;
  sleep.set_level(v1::SLEEP_LEVEL_KV_CACHE_AND_WEIGHTS);
  v1::SleepResponse slept;
  v1::WakeUpResponse awake;
  for (int round = 0; round < 2; ++round) {
    ISOBIT_ASSERT_OK(Call(&Stub::Sleep, *stub_, sleep, slept));
    EXPECT_GT(slept.released_bytes(), 0u);
    if (round > 0) {
      EXPECT_THAT(Call(&Stub::WakeUp, *stub_, v1::WakeUpRequest(), awake),
                  StatusIs(StatusCode::kFailedPrecondition, HasSubstr("send weights")));
    }
    ISOBIT_ASSERT_OK(Send(Of(2)));
    ISOBIT_ASSERT_OK(Call(&Stub::WakeUp, *stub_, v1::WakeUpRequest(), awake));
    EXPECT_EQ(Logprobs(), expected);
  }
}

TEST_F(WeightStreamTest, EachFaultHasItsErrorAndTheOldWeightsServeOn) {
  Start();
  const std::vector<float> before = Logprobs();
  const char kTensor[] = "model.layers.0.self_attn.q_proj.weight";
  const struct {
    const char* what;
    std::function<void(Messages&)> spoil;
    StatusCode code;
    std::vector<std::string> told;
  } kCases[] = {
      {"a piece twice",
       [&](Messages& m) { m.insert(m.end() - 1, PieceOf(m, kTensor)); },
       StatusCode::kInvalidArgument,
       {kTensor, "have come before"}},
      {"overlapping pieces",
       [&](Messages& m) { PieceOf(m, kTensor, 1000).mutable_piece()->set_offset(998); },
       StatusCode::kInvalidArgument,
       {kTensor, "have come before"}},
      {"outside its tensor",
       [&](Messages& m) { PieceOf(m, kTensor).mutable_piece()->set_offset(1 << 30); },
       StatusCode::kInvalidArgument,
       {kTensor, "from 1073741824: the tensor has "}},
      {"a piece left out",
       [&](Messages& m) { PieceOf(m, kTensor).mutable_piece()->mutable_data()->pop_back(); },
       StatusCode::kInvalidArgument,
       {kTensor, "before the end"}},
      {"of no tensor",
       [&](Messages& m) { PieceOf(m, kTensor).mutable_piece()->set_tensor(999); },
       StatusCode::kInvalidArgument,
       {"a piece of tensor 999"}},
      {"another shape",
       [&](Messages& m) { m[0].mutable_begin()->mutable_tensors(1)->set_shape(0, 3); },
       StatusCode::kInvalidArgument,
       {"tensors of another shape: model.layers.0.input_layernorm.weight is [3]"}},
      {"an endless shape",
       [&](Messages& m) { m[0].mutable_begin()->mutable_tensors(1)->set_shape(0, UINT64_MAX); },
       StatusCode::kInvalidArgument,
       {"model.layers.0.input_layernorm.weight", "negative"}},
      {"another dtype",
       [&](Messages& m) { m[0].mutable_begin()->mutable_tensors(1)->set_dtype("I8"); },
       StatusCode::kInvalidArgument,
       {"model.layers.0.input_layernorm.weight", "\"I8\", expected BF16, F16 or F32"}},
      {"fp16",
       [&](Messages& m) { m[0].mutable_begin()->mutable_tensors(1)->set_dtype("F16"); },
       StatusCode::kInvalidArgument,
       {"--round_fp16_weights"}},
      {"fp32 with the bytes of bf16",
       [&](Messages& m) { m[0].mutable_begin()->mutable_tensors(1)->set_dtype("F32"); },
       StatusCode::kInvalidArgument,
       {"model.layers.0.input_layernorm.weight", "before the end"}},
      {"an unknown tensor",
       [&](Messages& m) { m[0].mutable_begin()->mutable_tensors(1)->set_name("x"); },
       StatusCode::kInvalidArgument,
       {"missing tensors: model.layers.0.input_layernorm.weight", "unexpected tensors: \"x\""}},
      {"no tensors",
       [&](Messages& m) { m[0].mutable_begin()->clear_tensors(); },
       StatusCode::kInvalidArgument,
       {"missing tensors: model.embed_tokens.weight"}},
      {"an old version",
       [&](Messages& m) { m[0].mutable_begin()->set_weight_version(1); },
       StatusCode::kInvalidArgument,
       {"weight_version: expected more than 3"}},
      {"an unknown mode",
       [&](Messages& m) {
         m[0].mutable_begin()->set_in_flight_mode(static_cast<v1::InFlightMode>(9));
       },
       StatusCode::kInvalidArgument,
       {"in_flight_mode"}},
      {"another digest",
       [&](Messages& m) { m.back().mutable_end()->set_expected_digest("00"); },
       StatusCode::kFailedPrecondition,
       {"the weights have digest ", "expected 00"}},
      {"a wrong bit",
       [&](Messages& m) {
         m.back().mutable_end()->set_expected_digest(digest_of_v2_);
         (*PieceOf(m, kTensor, 1000).mutable_piece()->mutable_data())[17] ^= 2;
       },
       StatusCode::kFailedPrecondition,
       {"the weights have digest "}},
      {"no begin",
       [&](Messages& m) { m.erase(m.begin()); },
       StatusCode::kInvalidArgument,
       {"expected a begin, got a piece"}},
      {"an end alone",
       [&](Messages& m) { m.erase(m.begin(), m.end() - 1); },
       StatusCode::kInvalidArgument,
       {"expected a begin, got an end"}},
      {"nothing", [&](Messages& m) { m.clear(); }, StatusCode::kInvalidArgument, {"broke off"}},
      {"two begins",
       [&](Messages& m) { m.insert(m.begin() + 5, m[0]); },
       StatusCode::kInvalidArgument,
       {"expected one begin"}},
      {"an empty message",
       [&](Messages& m) { m.emplace(m.begin() + 5); },
       StatusCode::kInvalidArgument,
       {"got none of them"}},
      {"no end",
       [&](Messages& m) { m.pop_back(); },
       StatusCode::kInvalidArgument,
       {"broke off before its end"}},
      {"half of it",
       [&](Messages& m) { m.resize(m.size() / 2); },
       StatusCode::kInvalidArgument,
       {"broke off before its end"}},
  };
  ISOBIT_ASSERT_OK(UpdateTo("v2"));
  digest_of_v2_ = response_.current().digest();
  ISOBIT_ASSERT_OK(UpdateTo("v1"));
  const v1::WeightVersion serving = Serving();
  for (const auto& one : kCases) {
    Messages messages = Of();
    one.spoil(messages);
    const absl::Status status = Send(messages);
    EXPECT_THAT(status, StatusIs(one.code)) << one.what;
    for (const std::string& text : one.told) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(text)) << one.what;
    }
    EXPECT_EQ(Serving().id(), serving.id()) << one.what;
    EXPECT_EQ(Logprobs(), before) << one.what;
  }
  Messages good = Of();
  good.back().mutable_end()->set_expected_digest(digest_of_v2_);
  ISOBIT_ASSERT_OK(Send(good));
  EXPECT_NE(Logprobs(), before);
}

TEST_F(WeightStreamTest, TheSecondOfTwoTrainersIsRefused) {
  Start();
  const Messages messages = Of();
  grpc::ClientContext context;
  const auto writer = stub_->UpdateWeightsFromStream(&context, &response_);
  for (size_t i = 0; i < 10; ++i) ASSERT_TRUE(writer->Write(messages[i]));
  const auto refused =
      StatusIs(StatusCode::kAborted, HasSubstr("another weight update is in progress"));
  v1::UpdateWeightsResponse ignored;
  writer->WaitForInitialMetadata();  // the first has begun
  EXPECT_THAT(testing_support::Send(*stub_, Of(3), ignored), refused);
  v1::UpdateWeightsRequest directory;
  directory.set_model_path("v2");
  EXPECT_THAT(Call(&Stub::UpdateWeights, *stub_, directory, ignored), refused);
  for (size_t i = 10; i < messages.size(); ++i) ASSERT_TRUE(writer->Write(messages[i]));
  writer->WritesDone();
  ISOBIT_EXPECT_OK(FromGrpcStatus(writer->Finish(), context));
  EXPECT_EQ(Serving().id(), 2u);
}

TEST_F(WeightStreamTest, TheBeginIsAnsweredBeforeAnyPieceComes) {
  Start();
  const Messages messages = Of();
  {
    grpc::ClientContext context;
    const auto writer = stub_->UpdateWeightsFromStream(&context, &response_);
    ASSERT_TRUE(writer->Write(messages.front()));
    writer->WaitForInitialMetadata();
    EXPECT_EQ(context.GetServerInitialMetadata().count(kWeightsAcceptedKey), 1u);
    for (size_t i = 1; i < messages.size(); ++i) ASSERT_TRUE(writer->Write(messages[i]));
    writer->WritesDone();
    ISOBIT_EXPECT_OK(FromGrpcStatus(writer->Finish(), context));
  }
  Messages wrong = Of();
  wrong.front().mutable_begin()->mutable_tensors(0)->set_name("unknown");
  grpc::ClientContext context;
  const auto writer = stub_->UpdateWeightsFromStream(&context, &response_);
  ASSERT_TRUE(writer->Write(wrong.front()));
  writer->WaitForInitialMetadata();
  EXPECT_EQ(context.GetServerInitialMetadata().count(kWeightsAcceptedKey), 0u);
  EXPECT_THAT(FromGrpcStatus(writer->Finish(), context), StatusIs(StatusCode::kInvalidArgument));
}

TEST_F(WeightStreamTest, ASenderMayStopAtAnyMoment) {
  Start();
  const std::vector<float> before = Logprobs();
  const Messages messages = Of();
  for (size_t sent = 0; sent < messages.size(); sent += 1 + messages.size() / 12) {
    {
      grpc::ClientContext context;
      const auto writer = stub_->UpdateWeightsFromStream(&context, &response_);
      for (size_t i = 0; i < sent; ++i) ASSERT_TRUE(writer->Write(messages[i]));
      context.TryCancel();
      EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
    }
    EXPECT_EQ(Serving().id(), 1u) << sent;
    EXPECT_EQ(Logprobs(), before) << sent;
  }
  // The service gives the last one up soon.
  absl::Status status = Send(messages);
  for (int i = 0; i < 3000 && absl::IsAborted(status); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    status = Send(messages);
  }
  ISOBIT_EXPECT_OK(status);
  EXPECT_NE(Logprobs(), before);
}

TEST_F(WeightStreamTest, ASilentSenderIsRefused) {
  weight_stream_.max_silence = std::chrono::milliseconds(200);
  Start();
  Messages messages = Of();
  grpc::ClientContext context;
  const auto writer = stub_->UpdateWeightsFromStream(&context, &response_);
  for (size_t i = 0; i < 10; ++i) ASSERT_TRUE(writer->Write(messages[i]));
  EXPECT_THAT(FromGrpcStatus(writer->Finish(), context),
              StatusIs(StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("the sender was silent for 200 ms, expected byte "),
                             HasSubstr("of tensor \"model."))));
  ISOBIT_EXPECT_OK(Send(messages));
}

}  // namespace
}  // namespace isobit
