// VllmEngine's messages against isobit.v1's: each field acts or is refused, and defaults are those
// of the public interface.
#include "rollout/service/vllm_messages.h"

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/rpc/sampling_params_proto.h"
#include "gmock/gmock.h"
#include "google/protobuf/unknown_field_set.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using absl::StatusCode;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;
using testing_support::StatusIs;

constexpr uint32_t kContext = 100;

vllm_wire::GenerateRequest Plain() {
  vllm_wire::GenerateRequest request;
  for (const uint32_t id : {3, 14, 15}) request.mutable_tokenized()->add_input_ids(id);
  request.mutable_sampling_params();
  return request;
}

absl::StatusOr<v1::GenerateRequest> Read(const vllm_wire::GenerateRequest& request) {
  return ReadVllmRequest(request, kContext);
}

TEST(VllmMessagesTest, ZeroAndUnsetMeanWhatTheyMeanThere) {
  const auto request = Read(Plain());
  ISOBIT_ASSERT_OK(request);
  EXPECT_THAT(request->prompt_token_ids(), ElementsAre(3, 14, 15));
  EXPECT_TRUE(request->final_only());
  EXPECT_EQ(request->logprob_mode(), v1::LOGPROB_MODE_UNSPECIFIED);
  const SamplingParams params = SamplingParamsFromProto(request->sampling());
  EXPECT_EQ(params.temperature, 1.0f);
  EXPECT_EQ(params.top_p, 1.0f);
  EXPECT_EQ(params.top_k, 0);
  EXPECT_EQ(params.min_p, 0.0f);
  EXPECT_EQ(params.repetition_penalty, 1.0f);
  EXPECT_EQ(params.n, 1u);
  EXPECT_EQ(params.max_tokens, kContext - 3);
  EXPECT_EQ(params.min_tokens, 0u);
  EXPECT_EQ(params.logprobs, 0u);
  EXPECT_FALSE(params.seed);
  EXPECT_FALSE(params.ignore_eos);

  vllm_wire::GenerateRequest greedy = Plain();
  greedy.mutable_sampling_params()->set_temperature(0);
  greedy.mutable_sampling_params()->set_seed(-1);
  EXPECT_EQ(Read(greedy)->sampling().temperature(), 0.0f);
  EXPECT_TRUE(Read(greedy)->sampling().has_temperature()) << "0 is greedy, unset is 1";
  EXPECT_FALSE(Read(greedy)->sampling().has_seed());
}

TEST(VllmMessagesTest, ValuesArrive) {
  vllm_wire::GenerateRequest request = Plain();
  request.set_request_id("mine");
  request.set_stream(true);
  vllm_wire::SamplingParams& sampling = *request.mutable_sampling_params();
  sampling.set_temperature(0.5f);
  sampling.set_top_p(0.25f);
  sampling.set_top_k(std::numeric_limits<uint32_t>::max());
  sampling.set_min_p(0.125f);
  sampling.set_frequency_penalty(0.75f);
  sampling.set_presence_penalty(-0.75f);
  sampling.set_repetition_penalty(1.5f);
  sampling.set_max_tokens(7);
  sampling.set_min_tokens(2);
  sampling.add_stop_token_ids(9);
  sampling.set_ignore_eos(true);
  sampling.set_n(3);
  sampling.set_logprobs(4);
  sampling.set_seed(11);
  (*sampling.mutable_logit_bias())[5] = -2.0f;
  const auto read = Read(request);
  ISOBIT_ASSERT_OK(read);
  EXPECT_EQ(read->request_id(), "mine");
  EXPECT_FALSE(read->final_only());
  const SamplingParams params = SamplingParamsFromProto(read->sampling());
  EXPECT_EQ(params.temperature, 0.5f);
  EXPECT_EQ(params.top_p, 0.25f);
  EXPECT_EQ(params.top_k, std::numeric_limits<int32_t>::max()) << "all, not a negative number";
  EXPECT_EQ(params.min_p, 0.125f);
  EXPECT_EQ(params.frequency_penalty, 0.75f);
  EXPECT_EQ(params.presence_penalty, -0.75f);
  EXPECT_EQ(params.repetition_penalty, 1.5f);
  EXPECT_EQ(params.max_tokens, 7u);
  EXPECT_EQ(params.min_tokens, 2u);
  EXPECT_THAT(params.stop_token_ids, ElementsAre(9));
  EXPECT_TRUE(params.ignore_eos);
  EXPECT_EQ(params.n, 3u);
  EXPECT_EQ(params.logprobs, 4u);
  EXPECT_EQ(params.seed, 11u);
  EXPECT_THAT(params.logit_bias, ElementsAre(std::pair(5, -2.0f)));
}

// Sets a field to something that is not its default.
void SetSomething(Message& message, const FieldDescriptor& field) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  if (field.is_map()) {
    (*static_cast<vllm_wire::SamplingParams&>(message).mutable_logit_bias())[1] = 1.0f;
    return;
  }
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.SetFloat(&message, &field, 0.5f);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(&message, &field, true);
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(&message, &field, 2);
    case FieldDescriptor::CPPTYPE_UINT32:
      return field.is_repeated() ? reflection.AddUInt32(&message, &field, 2)
                                 : reflection.SetUInt32(&message, &field, 2);
    case FieldDescriptor::CPPTYPE_STRING:
      return field.is_repeated() ? reflection.AddString(&message, &field, "x")
                                 : reflection.SetString(&message, &field, "x");
    case FieldDescriptor::CPPTYPE_MESSAGE:
      reflection.MutableMessage(&message, &field);
      return;
    default:
      FAIL() << field.full_name();
  }
}

// INVARIANT: nothing that a request asks for is passed over in silence.
TEST(VllmMessagesTest, EachFieldActsOrIsRefusedByName) {
  const std::string plain = Read(Plain())->SerializeAsString();
  std::set<std::string> passed_over, refused;
  const auto look = [&](const std::function<Message*(vllm_wire::GenerateRequest&)>& part) {
    vllm_wire::GenerateRequest first = Plain();
    const google::protobuf::Descriptor& type = *part(first)->GetDescriptor();
    for (int i = 0; i < type.field_count(); ++i) {
      vllm_wire::GenerateRequest request = Plain();
      SetSomething(*part(request), *type.field(i));
      const auto read = Read(request);
      if (!read.ok()) {
        EXPECT_THAT(read.status(),
                    StatusIs(StatusCode::kInvalidArgument, HasSubstr(type.field(i)->name())));
        refused.insert(type.field(i)->name());
      } else if (read->SerializeAsString() == plain) {
        passed_over.insert(type.field(i)->name());
      }
    }
  };
  look([](auto& request) { return &request; });
  look([](auto& request) { return request.mutable_sampling_params(); });
  look([](auto& request) { return request.mutable_tokenized(); });
  EXPECT_THAT(refused, UnorderedElementsAre("text", "kv_transfer_params", "mm_inputs",
                                            "kv_transfer_params_json", "data_parallel_rank", "stop",
                                            "json_schema", "regex", "grammar", "structural_tag",
                                            "json_object", "choice", "prompt_logprobs",
                                            "truncate_prompt_tokens"));
  // What is about text alone; and the two messages, which the other looks go into.
  EXPECT_THAT(
      passed_over,
      UnorderedElementsAre("original_text", "skip_special_tokens", "spaces_between_special_tokens",
                           "include_stop_str_in_output", "sampling_params", "tokenized"));
}

TEST(VllmMessagesTest, FieldsOfLaterVersionsAreRefusedByNumber) {
  const auto expect_refused = [](const vllm_wire::GenerateRequest& request, const char* type) {
    EXPECT_THAT(Read(request).status(),
                StatusIs(StatusCode::kInvalidArgument,
                         testing::AllOf(HasSubstr(type), HasSubstr("field number 77"))));
  };
  const auto add = [](Message& message) {
    message.GetReflection()->MutableUnknownFields(&message)->AddVarint(77, 1);
  };
  vllm_wire::GenerateRequest request = Plain();
  add(request);
  expect_refused(request, "GenerateRequest");
  request = Plain();
  add(*request.mutable_sampling_params());
  expect_refused(request, "SamplingParams");
  request = Plain();
  add(*request.mutable_tokenized());
  expect_refused(request, "TokenizedInput");
}

TEST(VllmMessagesTest, WhatUnsignedNumbersCannotSayIsRefused) {
  for (const auto& [set, name] :
       std::vector<std::pair<std::function<void(vllm_wire::SamplingParams&)>, const char*>>{
           {[](auto& sampling) { sampling.set_logprobs(-1); }, "sampling_params.logprobs"},
           {[](auto& sampling) { sampling.set_seed(-2); }, "sampling_params.seed"},
           {[](auto& sampling) { (*sampling.mutable_logit_bias())[-1] = 1.0f; },
            "sampling_params.logit_bias"}}) {
    vllm_wire::GenerateRequest request = Plain();
    set(*request.mutable_sampling_params());
    EXPECT_THAT(Read(request).status(), StatusIs(StatusCode::kInvalidArgument, HasSubstr(name)));
  }
}

TEST(VllmMessagesTest, ASampleThatMayNotFitIntoOneMessageMustBeStreamed) {
  vllm_wire::GenerateRequest request = Plain();
  request.mutable_sampling_params()->set_logprobs(64);
  ISOBIT_EXPECT_OK(ReadVllmRequest(request, 1 << 16).status());
  EXPECT_THAT(ReadVllmRequest(request, 1 << 17).status(),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("without stream")));
  request.set_stream(true);
  ISOBIT_EXPECT_OK(ReadVllmRequest(request, 1 << 17).status());
}

// Messages of the most bytes that the check allows for: its estimate is not below them.
TEST(VllmMessagesTest, TheBoundOfOneMessageHolds) {
  constexpr int kTokens = 1000, kAlternatives = 64;
  v1::TokenLogprobs tokens;
  for (int i = 0; i < kTokens; ++i) {
    tokens.add_token_ids(std::numeric_limits<int32_t>::max());
    tokens.add_logprobs(-1.5f);
    v1::TopLogprobs& top = *tokens.add_top();
    for (int k = 0; k < kAlternatives; ++k) {
      top.add_token_ids(std::numeric_limits<int32_t>::max());
      top.add_logprobs(-1.5f);
    }
  }
  vllm_wire::GenerateComplete complete;
  AddTokens(tokens, /*logprobs=*/true, complete);
  // As CheckFitsOneMessage counts.
  EXPECT_LE(complete.ByteSizeLong(), size_t{kTokens} * (5 + 9 + 10 + kAlternatives * 9) + 100);
}

TEST(VllmMessagesTest, APromptWithoutRoomAsksForATokenTooMany) {
  vllm_wire::GenerateRequest request = Plain();
  EXPECT_EQ(ReadVllmRequest(request, 3)->sampling().max_tokens(), 1u);
  EXPECT_EQ(ReadVllmRequest(request, 4)->sampling().max_tokens(), 1u);
  EXPECT_EQ(ReadVllmRequest(request, 5)->sampling().max_tokens(), 2u);
}

TEST(VllmMessagesTest, TokensAndEndOfASample) {
  v1::TokenLogprobs tokens;
  tokens.add_token_ids(7);
  tokens.add_logprobs(-0.25f);
  v1::TopLogprobs& top = *tokens.add_top();
  top.add_token_ids(8);
  top.add_logprobs(-0.125f);
  v1::GenerateComplete end;
  end.set_index(2);
  end.set_finish_reason(v1::FINISH_REASON_STOP);
  end.set_stop_token_id(0);
  end.set_num_prompt_tokens(5);
  end.set_num_cached_tokens(4);
  vllm_wire::GenerateComplete complete;
  AddTokens(tokens, /*logprobs=*/true, complete);
  AddTokens(tokens, /*logprobs=*/true, complete);
  SetEnd(end, complete);
  EXPECT_THAT(complete.output_ids(), ElementsAre(7, 7));
  EXPECT_EQ(complete.completion_tokens(), 2u);
  EXPECT_THAT(complete.output_logprobs().token_ids(), ElementsAre(7, 7));
  EXPECT_THAT(complete.output_logprobs().token_logprobs(), ElementsAre(-0.25f, -0.25f));
  EXPECT_THAT(complete.output_logprobs().top_logprobs(1).token_ids(), ElementsAre(8));
  EXPECT_THAT(complete.output_logprobs().top_logprobs(1).values(), ElementsAre(-0.125f));
  EXPECT_EQ(complete.index(), 2u);
  EXPECT_EQ(complete.finish_reason(), "stop");
  EXPECT_EQ(complete.matched_stop_case(), vllm_wire::GenerateComplete::kMatchedTokenId)
      << "token 0, too";
  EXPECT_EQ(complete.prompt_tokens(), 5u);
  EXPECT_EQ(complete.cached_tokens(), 4u);
  vllm_wire::GenerateComplete without;
  AddTokens(tokens, /*logprobs=*/false, without);
  EXPECT_FALSE(without.has_output_logprobs());
  end.clear_stop_token_id();
  for (const auto& [reason, name] : {std::pair{v1::FINISH_REASON_LENGTH, "length"},
                                     std::pair{v1::FINISH_REASON_ABORT, "abort"}}) {
    vllm_wire::GenerateComplete other;
    end.set_finish_reason(reason);
    SetEnd(end, other);
    EXPECT_EQ(other.finish_reason(), name);
    EXPECT_EQ(other.matched_stop_case(), vllm_wire::GenerateComplete::MATCHED_STOP_NOT_SET);
  }
}

TEST(VllmMessagesTest, ErrorsNameTheFieldsOfThisInterface) {
  EXPECT_THAT(
      WithVllmNames(absl::InvalidArgumentError(
          "prompt_token_ids + sampling.max_tokens: expected at most 8 tokens")),
      StatusIs(StatusCode::kInvalidArgument,
               "tokenized.input_ids + sampling_params.max_tokens: expected at most 8 tokens"));
  EXPECT_THAT(WithVllmNames(absl::UnavailableError("sampling.")),
              StatusIs(StatusCode::kUnavailable, "sampling."));
}

TEST(VllmMessagesTest, ModelAndLoad) {
  ModelConfig config;
  config.architecture = Architecture::kQwen3;
  config.vocab_size = 499;
  config.eos_token_ids = {1, 4};
  const auto model =
      VllmModelInfo({.served = "m", .directory = "/models/m", .tokenizer = "t"}, config, kContext);
  EXPECT_EQ(model.model_path(), "/models/m");
  EXPECT_EQ(model.served_model_name(), "m");
  EXPECT_EQ(model.tokenizer_path(), "t");
  EXPECT_EQ(model.model_type(), "qwen3");
  EXPECT_THAT(model.architectures(), ElementsAre("Qwen3ForCausalLM"));
  EXPECT_THAT(model.eos_token_ids(), ElementsAre(1, 4));
  EXPECT_EQ(model.bos_token_id(), 0);
  EXPECT_EQ(model.max_context_length(), kContext);
  EXPECT_TRUE(model.is_generation());

  v1::RolloutServerInfo info;
  info.set_page_size(16);
  info.set_max_running_requests(64);
  EngineLoad load;
  EXPECT_EQ(VllmLoad(load, info).token_usage(), 0.0) << "no page at all";
  EXPECT_EQ(VllmLoad(load, info).cache_hit_rate(), 0.0);
  load.num_running_requests = 2;
  load.num_waiting_requests = 3;
  load.num_waiting_tokens = 40;
  load.num_used_pages = 1;
  load.num_free_pages = 3;
  load.prompts.all = 8;
  load.prompts.cached = 2;
  const auto proto = VllmLoad(load, info);
  EXPECT_EQ(proto.num_running_reqs(), 2);
  EXPECT_EQ(proto.num_waiting_reqs(), 3);
  EXPECT_EQ(proto.num_total_reqs(), 5);
  EXPECT_EQ(proto.num_waiting_uncached_tokens(), 40);
  EXPECT_EQ(proto.num_used_tokens(), 16);
  EXPECT_EQ(proto.max_total_num_tokens(), 64);
  EXPECT_EQ(proto.token_usage(), 0.25);
  EXPECT_EQ(proto.cache_hit_rate(), 0.25);
  EXPECT_EQ(proto.max_running_requests(), 64);
  load.num_free_pages = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(VllmLoad(load, info).max_total_num_tokens(), std::numeric_limits<int32_t>::max());
}

}  // namespace
}  // namespace isobit
