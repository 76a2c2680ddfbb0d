// Weights that a sender brings in pieces over time, in any order, while they are packed. Every byte
// comes exactly once. Pieces that come before they are asked for are kept, up to a bound; beyond it
// only if a reader waits for a later piece. Given blocks, the weights stay in GPU memory of another
// process, and only the end comes. Not here: the wire (common/rpc/weight_stream.h).
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
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/tensor_source.h"
#include "common/checkpoint/weight_blocks.h"

namespace isobit {

struct WeightStreamLimits {
  // Bytes of pieces that have not been asked for, with the memory that keeps them. Above it the
  // sender waits, unless a reader waits for something else.
  size_t max_kept_bytes = 256 << 20;
  // How long a reader waits while the sender sends nothing.
  std::chrono::milliseconds max_silence{60'000};
};

// One thread sends, any number of threads read. INVARIANT: sender and readers never deadlock
// (StreamedSourceTest.AnyOrderFitsAnyBound).
class StreamedSource final : public TensorSource {
 public:
  // `tensors`, without data and sizes, in the order in which most of their bytes will come. Errors:
  // those of ValidateTensors, CheckRounding and ValidateBlocks; INVALID_ARGUMENT, naming the
  // tensor: a name is empty or repeated, or a shape is invalid. blocks: where the tensors lie, with
  // the numbers of `tensors`; then no bytes come, and Read must not be called.
  static absl::StatusOr<std::shared_ptr<StreamedSource>> Create(
      std::vector<Tensor> tensors, const TensorPlan& plan, const LoadPolicy& policy,
      const WeightStreamLimits& limits, std::optional<WeightBlocks> blocks = std::nullopt);

  // Called by the sender. None of these blocks.

  // Takes bytes of a tensor, by its number in Create's list, that begin at `offset`. An error names
  // the tensor, ends the source and reaches the readers. INVALID_ARGUMENT: no such tensor; the
  // bytes have come before, lie outside, or are none. RESOURCE_EXHAUSTED: too many small pieces.
  absl::Status Add(uint64_t tensor, uint64_t offset, std::string bytes);

  // The sender is done. expected_digest: the digest that the sender expects, or empty.
  // INVALID_ARGUMENT, naming a tensor: bytes are missing; this ends the source.
  absl::Status End(std::string expected_digest);

  // Ends the source with an error, for all readers from now on. Only the first error counts.
  void Fail(const absl::Status& error);

  // Calls `receive` once more bytes may come: now, later on a reader's thread, or never if the
  // source has ended. The first time, this is when a reader reads. One call at a time.
  void WhenWanted(std::function<void()> receive);

  // Called by readers.
  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override;
  size_t ArrivalOf(size_t tensor) const override { return numbers_[tensor]; }
  // Waits for End.
  absl::Status CheckUnchanged() const override;

  // The digest that End was given. Call it after CheckUnchanged.
  std::string expected_digest() const;

  // Where the tensors lie, by their numbers in tensors(); null: their bytes are sent.
  const WeightBlocks* blocks() const { return blocks_ ? &*blocks_ : nullptr; }
  std::chrono::milliseconds max_silence() const { return limits_.max_silence; }
  // The error that ended the source, or OK. Does not wait.
  absl::Status failure() const;

 private:
  using Pieces = std::map<size_t, std::string>;  // by offset
  struct Arrival {
    Pieces pieces = {};    // not used up by a reader yet; they do not overlap
    size_t num_read = 0;   // bytes, from the first
    size_t num_bytes = 0;  // that have come so far
    bool waits = false;    // a reader, for the byte num_read
  };

  explicit StreamedSource(const WeightStreamLimits& limits) : limits_(limits) {}

  // The caller holds mutex_ for all of these.
  absl::Status Take(uint64_t tensor, uint64_t offset, std::string bytes);
  absl::Status CheckComplete() const;
  void FailLocked(const absl::Status& error) const;
  void NoteReader() const;
  bool IsWanted() const;
  // Waits until StopWaiting is called. `what`: for the error about a sender that is silent for too
  // long.
  absl::Status Wait(std::unique_lock<std::mutex>& lock, bool& waits, absl::string_view what) const;
  void StopWaiting(bool& waits) const;
  // Lets the sender go on if it may. Releases the lock for that.
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
