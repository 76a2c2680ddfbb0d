// Pieces that wait for their reader, and readers that wait for their piece.
#include "common/checkpoint/streamed_source.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/opened_model.h"
#include "common/checkpoint/strict_json.h"  // Quoted
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/validate_tensors.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

// What a piece takes besides its bytes, and how many may be kept: enough for any sender that does
// not send single values in disorder.
constexpr size_t kPieceBytes = 128;
constexpr size_t kMaxPieces = 1 << 20;

}  // namespace

absl::StatusOr<std::shared_ptr<StreamedSource>> StreamedSource::Create(
    std::vector<Tensor> tensors, const TensorPlan& plan, const LoadPolicy& policy,
    const WeightStreamLimits& limits, std::optional<WeightBlocks> blocks) {
  for (Tensor& tensor : tensors) {
    const auto bytes = TensorBytes(tensor.dtype, tensor.shape);
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Quoted(tensor.name), ": ", bytes.status().message()));
    }
    tensor.size_bytes = *bytes;
  }
  if (blocks) ISOBIT_RETURN_IF_ERROR(ValidateBlocks(*blocks, tensors));
  const std::shared_ptr<StreamedSource> source(new StreamedSource(limits));
  source->numbers_.resize(tensors.size());
  std::iota(source->numbers_.begin(), source->numbers_.end(), size_t{0});
  std::sort(source->numbers_.begin(), source->numbers_.end(),
            [&](size_t a, size_t b) { return tensors[a].name < tensors[b].name; });
  source->sorted_.resize(tensors.size());
  for (const size_t number : source->numbers_) {
    if (!source->tensors_.empty() && source->tensors_.back().name == tensors[number].name) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Quoted(tensors[number].name), ": listed twice"));
    }
    source->sorted_[number] = source->tensors_.size();
    source->tensors_.push_back(std::move(tensors[number]));
  }
  source->arrivals_.resize(source->tensors_.size());
  source->blocks_ = std::move(blocks);
  if (source->blocks_) {
    for (WeightBlock& block : source->blocks_->blocks) block.tensor = source->sorted_[block.tensor];
  }
  ISOBIT_RETURN_IF_ERROR(ValidateTensors(plan, *source));
  ISOBIT_RETURN_IF_ERROR(CheckRounding(*source, policy));
  return source;
}

absl::Status StreamedSource::Add(uint64_t tensor, uint64_t offset, std::string bytes) {
  const std::lock_guard lock(mutex_);
  ISOBIT_RETURN_IF_ERROR(failure_);
  absl::Status taken = Take(tensor, offset, std::move(bytes));
  if (!taken.ok()) FailLocked(taken);
  silent_since_ = Clock::now();
  changed_.notify_all();
  return taken;
}

absl::Status StreamedSource::Take(uint64_t tensor, uint64_t offset, std::string bytes) {
  if (tensor >= sorted_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a piece of tensor ", tensor, ", expected 0 to ",
                                                   sorted_.size() - 1, ", as listed"));
  }
  const size_t index = sorted_[tensor];
  Arrival& arrival = arrivals_[index];
  const size_t size = tensors_[index].size_bytes;
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(tensors_[index].name), ", ",
                                                   bytes.size(), " bytes from ", offset, ": ",
                                                   why));
  };
  if (blocks_) return wrong("the begin has said where the tensor lies, expected no pieces");
  if (ended_) return wrong("they come after the end");
  if (bytes.empty()) return wrong("expected at least one");
  if (offset > size || bytes.size() > size - offset) {
    return wrong(absl::StrCat("the tensor has ", size));
  }
  const auto next = arrival.pieces.lower_bound(offset);
  const bool overlaps_next = next != arrival.pieces.end() && next->first < offset + bytes.size();
  const bool overlaps_previous = next != arrival.pieces.begin() &&
                                 std::prev(next)->first + std::prev(next)->second.size() > offset;
  if (offset < arrival.num_read || overlaps_next || overlaps_previous) {
    return wrong("some of them have come before");
  }
  if (kept_pieces_ == kMaxPieces) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tensor ", Quoted(tensors_[index].name), ": ", kMaxPieces,
                     " pieces wait for what comes before them: expected larger ones, or in order"));
  }
  if (offset <= arrival.num_read) StopWaiting(arrival.waits);
  arrival.num_bytes += bytes.size();
  kept_bytes_ += bytes.size() + kPieceBytes;
  ++kept_pieces_;
  arrival.pieces.emplace_hint(next, offset, std::move(bytes));
  return absl::OkStatus();
}

absl::Status StreamedSource::End(std::string expected_digest) {
  const std::lock_guard lock(mutex_);
  ISOBIT_RETURN_IF_ERROR(failure_);
  absl::Status complete = CheckComplete();
  if (!complete.ok()) FailLocked(complete);
  ended_ = true;
  StopWaiting(waits_for_end_);
  expected_digest_ = std::move(expected_digest);
  changed_.notify_all();
  return complete;
}

absl::Status StreamedSource::CheckComplete() const {
  if (blocks_) return absl::OkStatus();
  for (const size_t index : sorted_) {
    if (arrivals_[index].num_bytes == tensors_[index].size_bytes) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Quoted(tensors_[index].name), ": ", arrivals_[index].num_bytes,
                     " of its ", tensors_[index].size_bytes, " bytes have come before the end"));
  }
  return absl::OkStatus();
}

void StreamedSource::Fail(const absl::Status& error) {
  const std::lock_guard lock(mutex_);
  // Once all is there, the source needs its sender no longer.
  if (!ended_) FailLocked(error);
}

void StreamedSource::FailLocked(const absl::Status& error) const {
  if (failure_.ok()) failure_ = error;
  receive_ = nullptr;
  changed_.notify_all();
}

bool StreamedSource::IsWanted() const {
  return has_reader_ && (kept_bytes_ < limits_.max_kept_bytes || num_waiting_ > 0);
}

void StreamedSource::WhenWanted(std::function<void()> receive) {
  std::unique_lock lock(mutex_);
  if (!failure_.ok() || ended_) return;
  receive_ = std::move(receive);
  CallSender(lock);
}

void StreamedSource::CallSender(std::unique_lock<std::mutex>& lock) const {
  if (receive_ == nullptr || !IsWanted()) return;
  silent_since_ = Clock::now();
  const std::function<void()> receive = std::exchange(receive_, nullptr);
  lock.unlock();
  receive();
  lock.lock();
}

void StreamedSource::NoteReader() const {
  if (std::exchange(has_reader_, true)) return;
  silent_since_ = Clock::now();
}

absl::Status StreamedSource::Read(size_t tensor, size_t first, size_t size, uint8_t* out) const {
  Pieces::node_type used_up;  // freed without the lock
  std::unique_lock lock(mutex_);
  NoteReader();
  Arrival& arrival = arrivals_[tensor];
  ISOBIT_CHECK(arrival.num_read == first) << tensors_[tensor].name << ": read out of order";
  while (size > 0) {
    ISOBIT_RETURN_IF_ERROR(failure_);
    const auto piece = arrival.pieces.begin();
    if (piece == arrival.pieces.end() || piece->first > arrival.num_read) {
      ISOBIT_RETURN_IF_ERROR(Wait(
          lock, arrival.waits,
          absl::StrCat("byte ", arrival.num_read, " of tensor ", Quoted(tensors_[tensor].name))));
      continue;
    }
    const size_t begin = arrival.num_read - piece->first;
    const size_t count = std::min(size, piece->second.size() - begin);
    const auto* const bytes = reinterpret_cast<const uint8_t*>(piece->second.data());
    lock.unlock();  // the map may grow meanwhile, but this piece stays where it is
    std::memcpy(out, bytes + begin, count);
    lock.lock();
    arrival.num_read += count;
    out += count;
    size -= count;
    if (begin + count == piece->second.size()) {
      kept_bytes_ -= piece->second.size() + kPieceBytes;
      --kept_pieces_;
      used_up = arrival.pieces.extract(piece);
      CallSender(lock);
    }
  }
  return absl::OkStatus();
}

absl::Status StreamedSource::Wait(std::unique_lock<std::mutex>& lock, bool& waits,
                                  absl::string_view what) const {
  waits = true;
  ++num_waiting_;
  CallSender(lock);
  while (waits && failure_.ok()) {
    const Clock::time_point deadline = silent_since_ + limits_.max_silence;
    if (Clock::now() < deadline) {
      changed_.wait_until(lock, deadline);
    } else {
      FailLocked(absl::DeadlineExceededError(absl::StrCat(
          "the sender was silent for ", limits_.max_silence.count(), " ms, expected ", what)));
    }
  }
  StopWaiting(waits);
  return failure_;
}

void StreamedSource::StopWaiting(bool& waits) const {
  if (std::exchange(waits, false)) --num_waiting_;
}

absl::Status StreamedSource::CheckUnchanged() const {
  std::unique_lock lock(mutex_);
  NoteReader();
  while (failure_.ok() && !ended_)
    ISOBIT_RETURN_IF_ERROR(Wait(lock, waits_for_end_, "the end of the stream"));
  return failure_;
}

std::string StreamedSource::expected_digest() const {
  const std::lock_guard lock(mutex_);
  return expected_digest_;
}

absl::Status StreamedSource::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace isobit
