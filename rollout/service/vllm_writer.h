// Writes one Generate call as VllmEngine's clients expect it. With `stream`, every chunk is sent as
// it comes, and a sample's end repeats the tokens of its last chunk. Without, the chunks of a
// sample are joined, and its end has all tokens.
#ifndef ISOBIT_ROLLOUT_SERVICE_VLLM_WRITER_H_
#define ISOBIT_ROLLOUT_SERVICE_VLLM_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "common/rpc/stream_writer.h"
#include "rollout/service/generate_writer.h"
#include "rollout/service/vllm_messages.h"

namespace isobit {

// The fields of the request that its answers depend on.
struct VllmAnswers {
  bool stream = false;
  bool logprobs = false;
  uint32_t num_prompt_tokens = 0;
};

class VllmWriter final : public GenerateWriter {
 public:
  using Stream = StreamWriter<vllm_wire::GenerateResponse>;

  // `stream` takes one message at a time (OneAtATime).
  VllmWriter(std::shared_ptr<Stream> stream, const VllmAnswers& answers)
      : stream_(std::move(stream)), answers_(answers) {}

  WriteResult Write(v1::GenerateResponse message) override;
  void Finish(absl::Status status) override { stream_->Finish(WithVllmNames(status)); }
  bool closed() const override { return stream_->closed(); }
  size_t held_bytes() const override;

 private:
  // Tokens of a sample, kept for its end.
  struct Kept {
    vllm_wire::GenerateComplete tokens{};
    size_t bytes = 0;
  };

  WriteResult WriteChunk(const v1::GenerateChunk& chunk);
  WriteResult WriteEnd(const v1::GenerateComplete& end);
  // bytes: the size of the message in memory.
  WriteResult Send(vllm_wire::GenerateResponse message, size_t bytes);
  void Drop(uint32_t sample);

  const std::shared_ptr<Stream> stream_;
  const VllmAnswers answers_;
  std::map<uint32_t, Kept> kept_;  // by sample
  size_t kept_bytes_ = 0;
  size_t sent_bytes_ = 0;  // of the last message, its size in memory
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_VLLM_WRITER_H_
