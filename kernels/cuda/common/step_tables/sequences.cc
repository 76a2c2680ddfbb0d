// Lays the tables out one after the other, and copies them at once.
#include "kernels/cuda/common/step_tables/sequences.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/step_tables/shared_splits.h"

namespace isobit::cuda {
namespace {

constexpr size_t kAlignment = 64;  // words; every table begins at a multiple of 256 bytes

size_t Aligned(size_t words) { return RoundUp(words, kAlignment); }

int64_t PagesOf(const SequenceRows& s, int32_t page_size) {
  return s.num_rows == 0 ? 0 : CeilDiv(s.first_position + s.num_rows, page_size);
}

}  // namespace

// The pages come last, because a graph's bounds fix all sizes but theirs.
struct StepTableUpload::Layout {
  Layout(size_t num_rows, size_t num_sequences)
      : sequence_of_row(Aligned(num_rows)),
        first_row(sequence_of_row + Aligned(num_rows)),
        first_position(first_row + Aligned(num_sequences + 1)),
        first_page(first_position + Aligned(num_sequences)),
        own_split(first_page + Aligned(num_sequences)),
        groups(own_split + Aligned(num_sequences)),
        pages(groups + Aligned(num_sequences * kGroupWords)) {}

  static constexpr size_t kGroupWords = sizeof(SharedSplits) / sizeof(int32_t);

  size_t sequence_of_row;  // the ids are at 0
  size_t first_row;
  size_t first_position;
  size_t first_page;
  size_t own_split;
  size_t groups;
  size_t pages;
};

StepTableUpload::~StepTableUpload() {
  for (PinnedBuffer& buffer : pinned_) {
    if (buffer.copied != nullptr) {
      cudaEventSynchronize(buffer.copied);
      cudaEventDestroy(buffer.copied);
    }
    cudaFreeHost(buffer.words);
  }
  cudaFree(device_words_);
}

absl::Status StepTableUpload::Reserve(int64_t num_rows, int64_t num_sequences, int64_t num_pages) {
  const Layout layout(static_cast<size_t>(num_rows), static_cast<size_t>(num_sequences));
  return Grow(layout.pages + static_cast<size_t>(num_pages));
}

absl::Status StepTableUpload::Grow(size_t words) {
  if (words <= capacity_) return absl::OkStatus();
  const size_t capacity = std::max(Aligned(words), 2 * capacity_);
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());  // kernels may still read the old buffer
  capacity_ = 0;
  ++generation_;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaFree(device_words_));
  device_words_ = nullptr;
  ISOBIT_RETURN_IF_CUDA_ERROR(
      cudaMalloc(reinterpret_cast<void**>(&device_words_), capacity * sizeof(int32_t)));
  for (PinnedBuffer& buffer : pinned_) {
    if (buffer.copied == nullptr) {
      ISOBIT_RETURN_IF_CUDA_ERROR(
          cudaEventCreateWithFlags(&buffer.copied, cudaEventDisableTiming | cudaEventBlockingSync));
    }
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaFreeHost(buffer.words));
    buffer.words = nullptr;
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaMallocHost(reinterpret_cast<void**>(&buffer.words), capacity * sizeof(int32_t)));
  }
  capacity_ = capacity;
  return absl::OkStatus();
}

absl::Status StepTableUpload::Upload(absl::Span<const int32_t> ids,
                                     absl::Span<const SequenceRows> sequences, int32_t page_size,
                                     const StepBounds& bounds, cudaStream_t stream) {
  int64_t rows = 0;
  int64_t pages = 0;
  int64_t positions = 0;
  int64_t most_rows = 0;
  int64_t least_rows = std::numeric_limits<int32_t>::max();
  for (const SequenceRows& s : sequences) {
    if (s.num_rows == 0) continue;
    rows = std::max(rows, s.first_row + s.num_rows);
    pages += PagesOf(s, page_size);
    positions = std::max(positions, s.first_position + s.num_rows);
    most_rows = std::max(most_rows, s.num_rows);
    least_rows = std::min(least_rows, s.num_rows);
  }
  rows = std::max(rows, static_cast<int64_t>(ids.size()));
  if (std::max({rows, pages, positions}) > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("a step of ", rows, " rows, ", pages,
                                                   " pages and ", positions,
                                                   " positions: the limit is 2^31 - 1 of each"));
  }

  const auto num_rows = static_cast<size_t>(std::max<int64_t>(rows, bounds.num_rows));
  const auto num_sequences = std::max(sequences.size(), static_cast<size_t>(bounds.num_sequences));
  const Layout layout(num_rows, num_sequences);
  const size_t words = layout.pages + static_cast<size_t>(pages);
  if (absl::Status status = Grow(words); !status.ok()) return status;

  PinnedBuffer& buffer = pinned_[turn_];
  turn_ ^= 1;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(buffer.copied));
  int32_t* const to = buffer.words;
  std::fill(std::copy(ids.begin(), ids.end(), to), to + num_rows, 0);
  std::fill_n(to + layout.sequence_of_row, num_rows, -1);
  int32_t row = 0;
  size_t page = 0;
  for (size_t i = 0; i < num_sequences; ++i) {
    const SequenceRows s = i < sequences.size() ? sequences[i] : SequenceRows{};
    if (s.num_rows > 0) row = static_cast<int32_t>(s.first_row);
    to[layout.first_row + i] = row;
    to[layout.first_position + i] = static_cast<int32_t>(s.first_position);
    to[layout.first_page + i] = static_cast<int32_t>(page);
    std::fill_n(to + layout.sequence_of_row + row, s.num_rows, static_cast<int32_t>(i));
    row += static_cast<int32_t>(s.num_rows);
    const auto count = static_cast<size_t>(PagesOf(s, page_size));
    std::copy_n(s.pages, count, to + layout.pages + page);
    page += count;
  }
  to[layout.first_row + num_sequences] = row;
  bool shares = bounds.sharing == Sharing::kAlways;
  if (bounds.sharing != Sharing::kNever) {
    const int64_t saved = FindSharedSplits(
        sequences, page_size, absl::MakeSpan(to + layout.own_split, num_sequences),
        absl::MakeSpan(reinterpret_cast<SharedSplits*>(to + layout.groups), num_sequences));
    shares = shares || saved * bounds.kv_heads >= kLeastSavedItems;
  }
  ISOBIT_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(device_words_, to, words * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventRecord(buffer.copied, stream));

  ids_ = device_words_;
  sequences_.sequence_of_row = device_words_ + layout.sequence_of_row;
  sequences_.first_row = device_words_ + layout.first_row;
  sequences_.first_position = device_words_ + layout.first_position;
  sequences_.first_page = device_words_ + layout.first_page;
  sequences_.own_split = device_words_ + layout.own_split;
  sequences_.groups = reinterpret_cast<const SharedSplits*>(device_words_ + layout.groups);
  sequences_.pages = device_words_ + layout.pages;
  sequences_.num_rows = static_cast<int32_t>(num_rows);
  sequences_.num_sequences = static_cast<int32_t>(num_sequences);
  const bool padded = bounds.max_rows > 0;
  sequences_.min_rows = padded || most_rows == 0 ? 0 : static_cast<int32_t>(least_rows);
  sequences_.max_rows = std::max(static_cast<int32_t>(most_rows), bounds.max_rows);
  sequences_.max_positions = std::max(static_cast<int32_t>(positions), bounds.max_positions);
  sequences_.past_is_written = !bounds.writes_past;
  sequences_.shares = shares;
  return absl::OkStatus();
}

}  // namespace isobit::cuda
