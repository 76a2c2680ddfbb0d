// Weights that a sender brings in pieces over time, in any order, while they are packed. Every byte
// comes exactly once. What comes before it is asked for is kept, within a bound, unless readers
// wait for something that comes later. Or weights that stay where they are, in GPU memory of
// another process: then only the end comes. Not here: the wire (common/rpc/weight_stream.h).
#ifndef ISOBIT_COMMON_CHECKPOINT_STREAMED_SOURCE_H_
#define ISOBIT_COMMON_CHECKPOINT_STREAMED_SOURCE_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/load_policy.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_source.h"
#include "common/checkpoint/weight_blocks.h"

namespace isobit {

struct WeightStreamLimits {
  // Bytes of pieces, and of the memory that keeps them, that nobody has asked for. The sender waits
  // while there are more, unless a reader waits for something else.
  size_t max_kept_bytes = 256 << 20;
  // How long a reader waits for a sender that sends nothing.
  std::chrono::milliseconds max_silence{60'000};
};

// One thread sends, any number read. INVARIANT: sender and readers never wait for each other
// (StreamedSourceTest.AnyOrderFitsAnyBound).
class StreamedSource final : public TensorSource {
 public:
  // `tensors`, without data and sizes, in the order in which most of their bytes will come. Errors:
  // those of ValidateTensors, CheckRounding and ValidateBlocks. INVALID_ARGUMENT, naming the
  // tensor: a name twice or none, a shape that is none. blocks: where the tensors lie, which they
  // are numbered by as in `tensors`; then no bytes come, and nobody calls Read.
  static absl::StatusOr<std::shared_ptr<StreamedSource>> Create(
      std::vector<Tensor> tensors, const ModelConfig& config, const LoadPolicy& policy,
      const WeightStreamLimits& limits, std::optional<WeightBlocks> blocks = std::nullopt);

  // For the sender. None of them blocks.

  // Takes the bytes of a tensor, by its number in Create's list, that begin at `offset`. An error
  // names the tensor and ends the source, and readers get it. INVALID_ARGUMENT: no such tensor;
  // bytes that have come before, or lie outside; none. RESOURCE_EXHAUSTED: too many small pieces.
  absl::Status Add(uint64_t tensor, uint64_t offset, std::string bytes);

  // The sender is done. expected_digest: what it takes for the digest, or empty. INVALID_ARGUMENT,
  // naming a tensor: bytes are missing; ends the source.
  absl::Status End(std::string expected_digest);

  // Ends the source with an error, for readers that wait and for all later. The first error counts.
  void Fail(const absl::Status& error);

  // Calls `receive` once more bytes may come: now, or later on a reader's thread, or never if the
  // source has ended. At first that is when somebody reads. One at a time.
  void WhenWanted(std::function<void()> receive);

  // For readers.
  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override;
  size_t ArrivalOf(size_t tensor) const override { return numbers_[tensor]; }
  // Waits for End.
  absl::Status CheckUnchanged() const override;

  // What End was told. Call it after CheckUnchanged.
  std::string expected_digest() const;

  // Where the tensors lie, by their numbers in tensors(); null: their bytes come.
  const WeightBlocks* blocks() const { return blocks_ ? &*blocks_ : nullptr; }
  std::chrono::milliseconds max_silence() const { return limits_.max_silence; }
  // The error that ended the source, if one has. Does not wait.
  absl::Status failure() const;

 private:
  using Pieces = std::map<size_t, std::string>;  // by offset
  struct Arrival {
    Pieces pieces = {};    // that no reader has used up; they do not overlap
    size_t num_read = 0;   // bytes, from the first
    size_t num_bytes = 0;  // that have come
    bool waits = false;    // a reader, for the byte num_read
  };

  explicit StreamedSource(const WeightStreamLimits& limits) : limits_(limits) {}

  // All of them hold mutex_.
  absl::Status Take(uint64_t tensor, uint64_t offset, std::string bytes);
  absl::Status CheckComplete() const;
  void FailLocked(const absl::Status& error) const;
  void NoteReader() const;
  bool IsWanted() const;
  // Waits until somebody calls StopWaiting. `what`: for the error of a sender that is silent too
  // long.
  absl::Status Wait(std::unique_lock<std::mutex>& lock, bool& waits, absl::string_view what) const;
  void StopWaiting(bool& waits) const;
  // Lets the sender go on, if it may. Releases the lock for that.
  void CallSender(std::unique_lock<std::mutex>& lock) const;

  const WeightStreamLimits limits_;
  std::vector<size_t> numbers_;  // [tensor], in the sender's list
  std::vector<size_t> sorted_;   // [number], in tensors()
  std::optional<WeightBlocks> blocks_;

  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable changed_;
  mutable std::vector<Arrival> arrivals_;  // [tensor]
  mutable std::function<void()> receive_;
  mutable std::chrono::steady_clock::time_point silent_since_;
  mutable absl::Status failure_;
  mutable size_t kept_bytes_ = 0;
  mutable size_t kept_pieces_ = 0;
  mutable size_t num_waiting_ = 0;  // readers
  mutable bool waits_for_end_ = false;
  mutable bool has_reader_ = false;
  bool ended_ = false;
  std::string expected_digest_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_STREAMED_SOURCE_H_
