// The messages of a stream of weights, for tests that send some or spoil them.
#ifndef ISOBIT_TESTS_SUPPORT_WEIGHT_MESSAGES_H_
#define ISOBIT_TESTS_SUPPORT_WEIGHT_MESSAGES_H_

#include <grpcpp/client_context.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "isobit/v1/types.pb.h"
#include "kernels/model/model_plan.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/tiny_model.h"

namespace isobit::testing_support {

// A begin, each tensor in pieces of at most `longest` bytes, and an end without a digest.
inline std::vector<v1::WeightChunk> MessagesOf(const ModelConfig& config,
                                               const TinyWeights& weights, size_t longest = 1000) {
  std::vector<v1::WeightChunk> messages(1);
  for (const ExpectedTensor& spec : ExpectedTensors(ModelPlan(config))) {
    v1::WeightStreamBegin& begin = *messages[0].mutable_begin();
    const auto number = static_cast<uint32_t>(begin.tensors_size());
    v1::StreamedTensor& tensor = *begin.add_tensors();
    tensor.set_name(spec.name);
    tensor.set_dtype("BF16");
    tensor.mutable_shape()->Add(spec.shape.begin(), spec.shape.end());
    const std::vector<uint16_t>& values = weights.tensors.at(spec.name);
    const std::string bytes(reinterpret_cast<const char*>(values.data()), 2 * values.size());
    for (size_t at = 0; at < bytes.size(); at += longest) {
      v1::WeightPiece piece;
      piece.set_tensor(number);
      piece.set_offset(at);
      piece.set_data(bytes.substr(at, longest));
      *messages.emplace_back().mutable_piece() = std::move(piece);
    }
  }
  messages.emplace_back().mutable_end();
  return messages;
}

// Sends them all, or until the service answers. Stub: of rollout or scorer.
template <typename Stub>
absl::Status Send(Stub& stub, const std::vector<v1::WeightChunk>& messages,
                  v1::UpdateWeightsResponse& response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto writer = stub.UpdateWeightsFromStream(&context, &response);
  for (const v1::WeightChunk& message : messages) {
    if (!writer->Write(message)) break;
  }
  writer->WritesDone();
  return FromGrpcStatus(writer->Finish(), context);
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_WEIGHT_MESSAGES_H_
