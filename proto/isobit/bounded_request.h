// Reads requests off the wire with bounded memory. A message of a few million empty entries is
// small on the wire and gigabytes in memory, so its fields are counted before it is built. The
// services' generated code includes this file, so that every service reads requests like this.
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

// The most fields of a request, including those of nested messages. A packed array is one field, a
// string is one, an entry of a map is three. Half a million fields take at most some 60 MB; no
// request that a service accepts has that many.
inline constexpr int64_t kMaxRequestFields = 1 << 19;

// The result of scanning the bytes of a message.
enum class WireVerdict {
  kBounded,        // at most kMaxRequestFields; parsing it may yet fail
  kTooManyFields,  // more
  kMalformed,      // not a message of that type: truncated, nested too deeply, or with a group
};

// Scans `wire` as a message of `type`, to its end or to the first thing wrong. Takes constant
// memory, and time proportional to the number of fields.
WireVerdict ScanWire(const google::protobuf::Descriptor& type,
                     google::protobuf::io::ZeroCopyInputStream& wire);

// How a request was read, which gRPC itself does not keep.
struct RequestReading {
  size_t bytes = 0;   // on the wire
  std::string error;  // why it could not be read, naming its type; empty if it could
};

// How this thread read its last request. Empty if it has read none since the last call.
RequestReading TakeLastReading();

// gRPC calls these. Serialize does what gRPC does for every message.
class BoundedRequestTraits {
 public:
  static grpc::Status Serialize(const google::protobuf::MessageLite& message,
                                grpc::ByteBuffer* buffer, bool* own_buffer);
  // INVALID_ARGUMENT: more than kMaxRequestFields, or malformed.
  static grpc::Status Deserialize(grpc::ByteBuffer* buffer, google::protobuf::Message* message);
};

}  // namespace isobit

#define ISOBIT_BOUNDED_REQUEST(Package, Type)                                                \
  namespace Package {                                                                        \
  class Type;                                                                                \
  }                                                                                          \
  namespace grpc {                                                                           \
  template <>                                                                                \
  class SerializationTraits<::Package::Type, void> : public isobit::BoundedRequestTraits {}; \
  }

// Every message that a client can send.
ISOBIT_BOUNDED_REQUEST(isobit::v1, AbortRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, CompareRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, ContinueGenerationRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, GenerateRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, GetLoadRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, GetServerInfoRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, PauseGenerationRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, SleepRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, WakeUpRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, RecordRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, ScoreRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, UpdateWeightsRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, InitWeightTransferRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, StartWeightTransferRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, ReceiveWeightsRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, FinishWeightTransferRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, ShutdownWeightTransferRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, WatchRequest)
ISOBIT_BOUNDED_REQUEST(isobit::v1, WeightChunk)

ISOBIT_BOUNDED_REQUEST(vllm::grpc::engine, AbortRequest)
ISOBIT_BOUNDED_REQUEST(vllm::grpc::engine, GenerateRequest)
ISOBIT_BOUNDED_REQUEST(vllm::grpc::engine, GetLoadsRequest)
ISOBIT_BOUNDED_REQUEST(vllm::grpc::engine, GetModelInfoRequest)
ISOBIT_BOUNDED_REQUEST(vllm::grpc::engine, GetServerInfoRequest)
ISOBIT_BOUNDED_REQUEST(vllm::grpc::engine, HealthCheckRequest)
ISOBIT_BOUNDED_REQUEST(vllm::grpc::engine, NotServed)

#undef ISOBIT_BOUNDED_REQUEST

#endif  // ISOBIT_PROTO_ISOBIT_BOUNDED_REQUEST_H_
