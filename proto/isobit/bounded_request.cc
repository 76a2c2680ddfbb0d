// Counts fields, then parses. See bounded_request.h.
#include "proto/isobit/bounded_request.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace isobit {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Deeper than any message of ours; protobuf itself stops at 100.
constexpr int kMaxDepth = 16;

thread_local RequestReading last_reading;

class Scan {
 public:
  explicit Scan(CodedInputStream& wire) : wire_(wire) {}

  WireVerdict Message(const Descriptor& type, int depth) {
    if (depth > kMaxDepth) return WireVerdict::kMalformed;
    while (const uint32_t tag = wire_.ReadTag()) {
      if (++num_fields_ > kMaxRequestFields) return WireVerdict::kTooManyFields;
      const WireVerdict field = Field(type, tag, depth);
      if (field != WireVerdict::kBounded) return field;
    }
    return wire_.ConsumedEntireMessage() ? WireVerdict::kBounded : WireVerdict::kMalformed;
  }

 private:
  WireVerdict Field(const Descriptor& type, uint32_t tag, int depth) {
    switch (WireFormatLite::GetTagWireType(tag)) {
      case WireFormatLite::WIRETYPE_VARINT: {
        uint64_t value;
        return Verdict(wire_.ReadVarint64(&value));
      }
      case WireFormatLite::WIRETYPE_FIXED64:
        return Verdict(wire_.Skip(8));
      case WireFormatLite::WIRETYPE_FIXED32:
        return Verdict(wire_.Skip(4));
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        return Delimited(type, WireFormatLite::GetTagFieldNumber(tag), depth);
      default:  // groups, which proto3 does not have
        return WireVerdict::kMalformed;
    }
  }

  WireVerdict Delimited(const Descriptor& type, int number, int depth) {
    uint32_t size = 0;
    if (!wire_.ReadVarint32(&size) || size > uint32_t{std::numeric_limits<int>::max()}) {
      return WireVerdict::kMalformed;
    }
    const FieldDescriptor* field = type.FindFieldByNumber(number);
    if (field == nullptr || field->type() != FieldDescriptor::TYPE_MESSAGE) {
      return Verdict(wire_.Skip(static_cast<int>(size)));
    }
    const CodedInputStream::Limit outer = wire_.PushLimit(static_cast<int>(size));
    const WireVerdict message = Message(*field->message_type(), depth + 1);
    wire_.PopLimit(outer);
    return message;
  }

  static WireVerdict Verdict(bool read) {
    return read ? WireVerdict::kBounded : WireVerdict::kMalformed;
  }

  CodedInputStream& wire_;
  int64_t num_fields_ = 0;
};

// Empty if `message` was parsed from `buffer`.
std::string Parse(grpc::ByteBuffer* buffer, google::protobuf::Message* message) {
  const Descriptor& type = *message->GetDescriptor();
  grpc::ProtoBufferReader scanned(buffer);
  if (!scanned.status().ok()) return absl::StrCat(type.full_name(), ": expected one, got none");
  switch (ScanWire(type, scanned)) {
    case WireVerdict::kTooManyFields:
      return absl::StrCat(type.full_name(), ": expected at most ", kMaxRequestFields,
                          " fields, those of all entries counted, got more");
    case WireVerdict::kMalformed:
      break;
    case WireVerdict::kBounded:
      grpc::ProtoBufferReader reader(buffer);
      if (message->ParseFromZeroCopyStream(&reader)) return "";
  }
  return absl::StrCat(type.full_name(),
                      ": malformed: no message of this type, or text that is not ", "UTF-8");
}

}  // namespace

WireVerdict ScanWire(const Descriptor& type, google::protobuf::io::ZeroCopyInputStream& wire) {
  CodedInputStream stream(&wire);
  return Scan(stream).Message(type, 0);
}

RequestReading TakeLastReading() { return std::exchange(last_reading, {}); }

grpc::Status BoundedRequestTraits::Serialize(const google::protobuf::MessageLite& message,
                                             grpc::ByteBuffer* buffer, bool* own_buffer) {
  return grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::MessageLite>(
      message, buffer, own_buffer);
}

grpc::Status BoundedRequestTraits::Deserialize(grpc::ByteBuffer* buffer,
                                               google::protobuf::Message* message) {
  last_reading = {.bytes = buffer->Length(), .error = Parse(buffer, message)};
  buffer->Clear();
  if (last_reading.error.empty()) return grpc::Status::OK;
  message->Clear();
  return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, last_reading.error);
}

}  // namespace isobit
