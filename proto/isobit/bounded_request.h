// How requests are read off the wire: a message of a few million empty entries is small there and
// gigabytes in memory, so its fields are counted before it is built. The code that is generated for
// the services includes this, so all of it reads them so.
#ifndef ISOBIT_PROTO_ISOBIT_BOUNDED_REQUEST_H_
#define ISOBIT_PROTO_ISOBIT_BOUNDED_REQUEST_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>
#include <google/protobuf/message.h>
#include <grpcpp/impl/codegen/serialization_traits.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace isobit {

// Fields that a request may have, those of its entries, their entries and so on included. A packed
// array is one field, a string is one, an entry of a map is three. Half a million cost at most some
// 60 MB; no request that a service accepts has as many.
inline constexpr int64_t kMaxRequestFields = 1 << 19;

// What a scan of the bytes of a message found.
enum class WireVerdict {
  kBounded,        // at most kMaxRequestFields; parsing it may yet fail
  kTooManyFields,  // more
  kMalformed,      // no message of that type: truncated, too deep, a group
};

// Scans `wire`, to its end unless there is something wrong, as a message of `type`. Takes constant
// memory, and time in proportion to the number of fields.
WireVerdict ScanWire(const google::protobuf::Descriptor& type,
                     google::protobuf::io::ZeroCopyInputStream& wire);

// How a request was read. gRPC itself forgets both.
struct RequestReading {
  size_t bytes = 0;   // on the wire
  std::string error;  // why it could not be read, naming its type; empty if it could
};

// How this thread read its last request; nothing if there was none since the last call of this.
RequestReading TakeLastReading();

// What gRPC calls. Serialize is what it does for every message.
class BoundedRequestTraits {
 public:
  static grpc::Status Serialize(const google::protobuf::MessageLite& message,
                                grpc::ByteBuffer* buffer, bool* own_buffer);
  // INVALID_ARGUMENT: more than kMaxRequestFields, or malformed.
  static grpc::Status Deserialize(grpc::ByteBuffer* buffer, google::protobuf::Message* message);
};

}  // namespace isobit

#define ISOBIT_BOUNDED_REQUEST(Type)                                                          \
  namespace isobit::v1 {                                                                      \
  class Type;                                                                                 \
  }                                                                                           \
  namespace grpc {                                                                            \
  template <>                                                                                 \
  class SerializationTraits<isobit::v1::Type, void> : public isobit::BoundedRequestTraits {}; \
  }

// Every message that a service takes.
ISOBIT_BOUNDED_REQUEST(AbortRequest)
ISOBIT_BOUNDED_REQUEST(CompareRequest)
ISOBIT_BOUNDED_REQUEST(ContinueGenerationRequest)
ISOBIT_BOUNDED_REQUEST(GenerateRequest)
ISOBIT_BOUNDED_REQUEST(GetLoadRequest)
ISOBIT_BOUNDED_REQUEST(GetServerInfoRequest)
ISOBIT_BOUNDED_REQUEST(PauseGenerationRequest)
ISOBIT_BOUNDED_REQUEST(RecordRequest)
ISOBIT_BOUNDED_REQUEST(ScoreRequest)
ISOBIT_BOUNDED_REQUEST(UpdateWeightsRequest)
ISOBIT_BOUNDED_REQUEST(WatchRequest)

#undef ISOBIT_BOUNDED_REQUEST

#endif  // ISOBIT_PROTO_ISOBIT_BOUNDED_REQUEST_H_
