// Whatever bytes a client sends, a request is bounded before it is built in memory.
#include "proto/isobit/bounded_request.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "isobit/v1/comparator.pb.h"
#include "isobit/v1/rollout.pb.h"
#include "isobit/v1/scorer.pb.h"

namespace isobit {
namespace {

using google::protobuf::io::ArrayInputStream;

// Scanned in blocks of `block_size` bytes; 0: in one.
template <class Message>
WireVerdict Scan(const std::string& wire, int block_size = 0) {
  ArrayInputStream stream(wire.data(), static_cast<int>(wire.size()),
                          block_size > 0 ? block_size : -1);
  return ScanWire(*Message::descriptor(), stream);
}

std::string Repeat(const std::string& entry, int64_t times) {
  std::string all;
  all.reserve(entry.size() * static_cast<size_t>(times));
  for (int64_t i = 0; i < times; ++i) all += entry;
  return all;
}

// `payload` as the submessage `number`, which is below 16.
std::string Inside(int number, const std::string& payload) {
  std::string wire(1, static_cast<char>((number << 3) | 2));
  size_t size = payload.size();
  for (; size >= 128; size >>= 7) wire.push_back(static_cast<char>((size & 127) | 128));
  wire.push_back(static_cast<char>(size));
  return wire + payload;
}

v1::RecordRequest SomeRecord() {
  v1::RecordRequest record;
  record.set_sequence_id("a sequence with \x0a\x00\x0a\x00 in its name");
  for (v1::RecordSide* side : {record.mutable_rollout(), record.mutable_scorer()}) {
    v1::TokenLogprobs& tokens = *side->mutable_tokens();
    for (uint32_t i = 0; i < 100; ++i) {
      tokens.add_token_ids(i * 1000);
      tokens.add_logprobs(-0.5f);
      tokens.add_weight_versions(UINT64_MAX);
      v1::TopLogprobs& top = *tokens.add_top();
      top.add_token_ids(7);
      top.add_logprobs(-1);
    }
    side->mutable_fingerprint()->set_hex("00ff");
    side->mutable_weight_version()->set_id(3);
  }
  return record;
}

TEST(BoundedRequestTest, TakesAsManyFieldsAsTheLimitAndNotOneMore) {
  EXPECT_EQ(Scan<v1::ScoreRequest>(""), WireVerdict::kBounded);
  const std::string most = Repeat(Inside(1, ""), kMaxRequestFields);
  EXPECT_EQ(Scan<v1::ScoreRequest>(most), WireVerdict::kBounded);
  EXPECT_EQ(Scan<v1::ScoreRequest>(most + Inside(1, "")), WireVerdict::kTooManyFields);
}

TEST(BoundedRequestTest, CountsEntriesAtEveryDepthOfEveryKind) {
  const int64_t more = kMaxRequestFields;  // with what is around them
  // rollout.tokens.top, sampling.logit_bias, fields that nobody knows.
  EXPECT_EQ(Scan<v1::RecordRequest>(Inside(2, Inside(1, Repeat(Inside(4, ""), more)))),
            WireVerdict::kTooManyFields);
  EXPECT_EQ(Scan<v1::GenerateRequest>(Inside(3, Repeat(Inside(14, ""), more))),
            WireVerdict::kTooManyFields);
  EXPECT_EQ(Scan<v1::GetLoadRequest>(Repeat(Inside(9, ""), more + 1)), WireVerdict::kTooManyFields);
  EXPECT_EQ(Scan<v1::GetLoadRequest>(Repeat("\x48\x01", more + 1)), WireVerdict::kTooManyFields);
  // Several kinds of fields, each below the limit.
  const std::string half = Inside(1, Repeat(Inside(1, ""), more / 2));
  EXPECT_EQ(Scan<v1::CompareRequest>(half), WireVerdict::kBounded);
  EXPECT_EQ(Scan<v1::RecordRequest>(Inside(2, half) + Inside(3, half)),
            WireVerdict::kTooManyFields);
}

TEST(BoundedRequestTest, TextAndPackedArraysAreOneFieldEach) {
  v1::GenerateRequest request;
  request.set_request_id(Repeat("\x0a\x01", 1 << 20));
  request.mutable_prompt_token_ids()->Resize(1 << 20, 10);
  EXPECT_EQ(Scan<v1::GenerateRequest>(request.SerializeAsString()), WireVerdict::kBounded);
}

TEST(BoundedRequestTest, RefusesWhatIsNoMessage) {
  for (const std::string& wire : std::vector<std::string>{
           "\x0a", "\x0a\x05", std::string("\x0a\xff\xff\xff\xff\x07"),
           "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "\x08\xff", "\x09\x01",
           std::string("\x00", 1), "\x0b\x0c", "\x0c", "\x0e", Inside(1, "\x0a\x05")}) {
    v1::ScoreRequest parsed;  // what the scan accepts, the parser refuses
    EXPECT_TRUE(Scan<v1::ScoreRequest>(wire) == WireVerdict::kMalformed ||
                !parsed.ParseFromString(wire))
        << testing::PrintToString(wire);
  }
}

TEST(BoundedRequestTest, DepthIsThatOfTheTypeNotOfTheBytes) {
  std::string nested;
  for (int i = 0; i < 100000; ++i) nested = Inside(1, nested.substr(0, 1 << 10));
  EXPECT_EQ(Scan<v1::ScoreRequest>(Inside(1, nested)), WireVerdict::kBounded)
      << "sequence_id is text: nobody looks into it";
}

// The scan refuses nothing that protobuf reads, except groups, which proto3 does not write.
TEST(BoundedRequestTest, AgreesWithTheParserOnEveryPrefixAndInEveryBlockSize) {
  const std::string wire = SomeRecord().SerializeAsString();
  for (size_t size = 0; size <= wire.size(); ++size) {
    const std::string prefix = wire.substr(0, size);
    v1::RecordRequest parsed;
    if (parsed.ParseFromString(prefix)) {
      EXPECT_EQ(Scan<v1::RecordRequest>(prefix), WireVerdict::kBounded) << size;
    }
  }
  for (const int block : {1, 2, 3, 7, 100}) {
    EXPECT_EQ(Scan<v1::RecordRequest>(wire, block), WireVerdict::kBounded) << block;
  }
}

TEST(BoundedRequestTest, SurvivesMutations) {
  const std::string wire = SomeRecord().SerializeAsString();
  std::mt19937 random(1);
  int num_bounded = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string mutated = wire;
    for (int m = 0; m < 1 + i % 4; ++m) {
      mutated[random() % mutated.size()] = static_cast<char>(random());
    }
    num_bounded += Scan<v1::RecordRequest>(mutated) == WireVerdict::kBounded;
  }
  EXPECT_GT(num_bounded, 1000);
  EXPECT_LT(num_bounded, 20000);
}

grpc::ByteBuffer Buffer(const std::string& wire) {
  const grpc::Slice slice(wire);
  return grpc::ByteBuffer(&slice, 1);
}

TEST(BoundedRequestTest, ReadsThroughTheTraitsAndSaysHow) {
  using Traits = grpc::SerializationTraits<v1::ScoreRequest>;
  v1::ScoreRequest request;
  grpc::ByteBuffer good = Buffer(Inside(1, Inside(1, "id")));
  EXPECT_TRUE(Traits::Deserialize(&good, &request).ok());
  EXPECT_EQ(request.sequences(0).sequence_id(), "id");
  RequestReading reading = TakeLastReading();
  EXPECT_EQ(reading.bytes, 6u);
  EXPECT_EQ(reading.error, "");

  grpc::ByteBuffer malformed = Buffer(Inside(1, Inside(1, "\xff")));
  EXPECT_EQ(Traits::Deserialize(&malformed, &request).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(request.sequences_size(), 0);
  reading = TakeLastReading();
  EXPECT_NE(reading.error.find("isobit.v1.ScoreRequest: malformed"), std::string::npos);
  EXPECT_EQ(TakeLastReading().error, "") << "it was taken";

  grpc::ByteBuffer none;
  EXPECT_FALSE(Traits::Deserialize(&none, &request).ok()) << "a call may end without a message";

  grpc::ByteBuffer many = Buffer(Repeat(Inside(1, ""), kMaxRequestFields + 1));
  EXPECT_FALSE(Traits::Deserialize(&many, &request).ok());
  EXPECT_NE(TakeLastReading().error.find("isobit.v1.ScoreRequest: expected at most 524288 fields"),
            std::string::npos);
}

}  // namespace
}  // namespace isobit
