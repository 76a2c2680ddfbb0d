// Chunks as they come, or joined at the end.
#include "rollout/service/vllm_writer.h"

#include <algorithm>

namespace isobit {
namespace {

// Memory of these tokens in a GenerateComplete. Arrays grow by doubling.
size_t BytesOf(const v1::TokenLogprobs& tokens, bool logprobs) {
  constexpr size_t kTop = sizeof(vllm_wire::TopLogProbs) + sizeof(void*) + 2 * 16;  // 2 allocations
  const auto count = static_cast<size_t>(tokens.token_ids_size());
  size_t bytes = 2 * sizeof(uint32_t) * count;
  if (!logprobs) return bytes;
  bytes += 2 * (sizeof(uint32_t) + sizeof(float)) * count;
  for (const v1::TopLogprobs& top : tokens.top()) {
    bytes += kTop + (sizeof(uint32_t) + sizeof(float)) * static_cast<size_t>(top.token_ids_size());
  }
  return bytes;
}

vllm_wire::GenerateResponse ChunkOf(const vllm_wire::GenerateComplete& tokens,
                                    uint32_t num_prompt_tokens) {
  vllm_wire::GenerateResponse response;
  vllm_wire::GenerateStreamChunk& chunk = *response.mutable_chunk();
  chunk.set_index(tokens.index());
  *chunk.mutable_token_ids() = tokens.output_ids();
  chunk.set_prompt_tokens(num_prompt_tokens);
  chunk.set_completion_tokens(tokens.completion_tokens());
  if (tokens.has_output_logprobs()) *chunk.mutable_output_logprobs() = tokens.output_logprobs();
  return response;
}

}  // namespace

WriteResult VllmWriter::Write(v1::GenerateResponse message) {
  const WriteResult result =
      message.has_chunk() ? WriteChunk(message.chunk()) : WriteEnd(message.complete());
  if (result == WriteResult::kClosed) {
    kept_.clear();
    kept_bytes_ = 0;
  }
  return result;
}

WriteResult VllmWriter::WriteChunk(const v1::GenerateChunk& chunk) {
  const size_t bytes = BytesOf(chunk.tokens(), answers_.logprobs);
  if (!answers_.stream) {
    if (stream_->closed()) return WriteResult::kClosed;
    Kept& kept = kept_[chunk.index()];
    AddTokens(chunk.tokens(), answers_.logprobs, kept.tokens);
    kept.bytes += bytes;
    kept_bytes_ += bytes;
    return WriteResult::kQueued;
  }
  Kept last{.bytes = bytes};
  last.tokens.set_index(chunk.index());
  AddTokens(chunk.tokens(), answers_.logprobs, last.tokens);
  const WriteResult result = Send(ChunkOf(last.tokens, answers_.num_prompt_tokens), bytes);
  if (result == WriteResult::kQueued) {
    Drop(chunk.index());
    kept_bytes_ += bytes;
    kept_[chunk.index()] = std::move(last);
  }
  return result;
}

WriteResult VllmWriter::WriteEnd(const v1::GenerateComplete& end) {
  const auto kept = kept_.find(end.index());
  vllm_wire::GenerateResponse response;
  if (kept != kept_.end()) *response.mutable_complete() = kept->second.tokens;
  SetEnd(end, *response.mutable_complete());
  const WriteResult result =
      Send(std::move(response), kept == kept_.end() ? 0 : kept->second.bytes);
  if (result == WriteResult::kQueued) Drop(end.index());
  return result;
}

WriteResult VllmWriter::Send(vllm_wire::GenerateResponse message, size_t bytes) {
  const WriteResult result = stream_->Write(std::move(message));
  if (result == WriteResult::kQueued) sent_bytes_ = bytes;
  return result;
}

void VllmWriter::Drop(uint32_t sample) {
  const auto kept = kept_.find(sample);
  if (kept == kept_.end()) return;
  kept_bytes_ -= kept->second.bytes;
  kept_.erase(kept);
}

size_t VllmWriter::held_bytes() const {
  // The message in flight: as an object, which is the larger, and serialised.
  const size_t queued = stream_->queued_bytes();
  return kept_bytes_ + (queued == 0 ? 0 : queued + std::max(queued, sent_bytes_));
}

}  // namespace isobit
