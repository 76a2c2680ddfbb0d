// The holders of a HeldWeights as senders, on the host: docs/API.md, "Weights by NCCL", said again
// for one rank that receives.
#ifndef ISOBIT_TESTS_SUPPORT_HELD_WEIGHT_SENDERS_H_
#define ISOBIT_TESTS_SUPPORT_HELD_WEIGHT_SENDERS_H_

#include <array>
#include <cstring>
#include <deque>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/parallel/weight_senders.h"
#include "tests/support/held_weights.h"

namespace isobit::testing_support {

class HeldWeightSenders final : public WeightSenders {
 public:
  // `held` outlives the object.
  explicit HeldWeightSenders(const HeldWeights& held)
      : held_(held), requests_(held.memory.size()) {}

  absl::Status Join(const SenderGroup& /*group*/) override { return absl::OkStatus(); }

  absl::Status Exchange(absl::Span<const SenderTransfer> transfers) override {
    for (const SenderTransfer& t : transfers) {
      Requests& requests = requests_[static_cast<size_t>(t.sender)];
      if (!t.to_sender) {
        ISOBIT_RETURN_IF_ERROR(Send(requests, t));
        continue;
      }
      const bool is_count = requests.expected < 0;
      std::vector<int64_t> words(t.bytes / sizeof(int64_t));
      std::memcpy(words.data(), t.memory, t.bytes);
      if (is_count) {
        requests.expected = words.at(0);
        continue;
      }
      if (words.size() != static_cast<size_t>(requests.expected) * 6) {
        return absl::InternalError("a list of another length than announced");
      }
      for (size_t at = 0; at < words.size(); at += 6) {
        requests.parts.push_back(
            {words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4], words[at + 5]});
      }
    }
    return absl::OkStatus();
  }

  absl::Status Leave(const absl::Status& so_far) override {
    return held_.ends_with.ok() ? so_far : held_.ends_with;
  }

  // Parts that were asked for and not taken.
  size_t num_kept() const {
    size_t kept = 0;
    for (const Requests& requests : requests_) kept += requests.parts.size();
    return kept;
  }

 private:
  // Of one sender.
  struct Requests {
    int64_t expected = -1;  // how many the rank has announced
    std::deque<std::array<int64_t, 6>> parts{};
    int64_t job = 0;
  };

  absl::Status Send(Requests& requests, const SenderTransfer& to) const {
    if (requests.parts.empty()) return absl::InternalError("nothing is asked for");
    const auto [job, tensor, first_row, rows, first_column, columns] = requests.parts.front();
    requests.parts.pop_front();
    if (job < requests.job) return absl::InternalError("an earlier job");
    requests.job = job;
    const size_t item = ItemSize(held_.tensors[static_cast<size_t>(tensor)].dtype);
    const size_t row_bytes = static_cast<size_t>(columns) * item;
    if (to.bytes != static_cast<size_t>(rows) * row_bytes) {
      return absl::InternalError(absl::StrCat(to.bytes, " bytes are not what was asked for"));
    }
    for (const WeightBlock& block : held_.blocks.blocks) {
      const int64_t row = first_row - block.first_row;
      const int64_t column = first_column - block.first_column;
      if (block.tensor != static_cast<size_t>(tensor) ||
          block.holder != static_cast<size_t>(to.sender) || row < 0 ||
          row + rows > block.num_rows || column < 0 || column + columns > block.num_columns) {
        continue;
      }
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(to.memory + static_cast<size_t>(r) * row_bytes,
                    held_.memory[block.holder].data() + block.offset +
                        static_cast<size_t>((row + r) * block.row_stride + column) * item,
                    row_bytes);
      }
      return absl::OkStatus();
    }
    return absl::InternalError("the sender does not hold what was asked for");
  }

  const HeldWeights& held_;
  std::vector<Requests> requests_;  // [sender]
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_HELD_WEIGHT_SENDERS_H_
