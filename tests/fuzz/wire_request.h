// Reads a request as a service does: counts its fields, then parses it.
#ifndef ISOBIT_TESTS_FUZZ_WIRE_REQUEST_H_
#define ISOBIT_TESTS_FUZZ_WIRE_REQUEST_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "common/base/check.h"
#include "proto/isobit/bounded_request.h"

namespace isobit::fuzz {

// The request; nullopt if the service would refuse the bytes. A refusal must have a message.
template <typename Request>
std::optional<Request> ReadRequest(const uint8_t* data, size_t size) {
  const grpc::Slice slice(data, size);
  grpc::ByteBuffer buffer(&slice, 1);
  Request request;
  const grpc::Status read = BoundedRequestTraits::Deserialize(&buffer, &request);
  ISOBIT_CHECK(read.ok() == TakeLastReading().error.empty());
  if (read.ok()) return request;
  ISOBIT_CHECK(read.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  return std::nullopt;
}

}  // namespace isobit::fuzz

#endif  // ISOBIT_TESTS_FUZZ_WIRE_REQUEST_H_
