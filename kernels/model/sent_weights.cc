// What each rank asks of each sender, and the messages.
#include "kernels/model/sent_weights.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "common/base/status_macros.h"

namespace isobit {
namespace {

constexpr size_t kRequestWords = 6;

// Some rows and columns of a slice, from one sender. It arrives without gaps.
struct Part {
  size_t slice;  // of the job
  const WeightBlock* block;
  Interval rows;
  Interval columns;
  size_t offset;  // bytes, where it arrives
};

class SentWeights final : public SliceSource {
 public:
  SentWeights(const std::vector<Tensor>& tensors, const WeightBlocks& blocks, int num_senders,
              DevicePacker& packer)
      : tensors_(tensors),
        blocks_of_(BlocksOfTensors(tensors, blocks)),
        senders_(*packer.senders()),
        packer_(packer),
        requests_(static_cast<size_t>(num_senders)) {}

  absl::Status Plan(absl::Span<const absl::Span<const WantedSlice>> jobs) override {
    size_t arriving = 1;  // bytes of the largest job
    for (const absl::Span<const WantedSlice> slices : jobs) {
      std::vector<Part>& parts = parts_.emplace_back();
      size_t bytes = 0;
      for (size_t s = 0; s < slices.size(); ++s) {
        for (const WeightBlock* block : blocks_of_[slices[s].tensor]) {
          AddPart(slices[s], s, *block, parts, bytes);
        }
      }
      arriving = std::max(arriving, bytes);
    }
    ISOBIT_ASSIGN_OR_RETURN(arrived_, packer_.Allocate(arriving));
    return SendRequests();
  }

  absl::Status Fetch(absl::Span<const WantedSlice> slices, DevicePacker& packer) override {
    const std::vector<Part>& parts = parts_[next_job_++];
    std::vector<SenderTransfer> transfers;
    transfers.reserve(parts.size());
    for (const Part& part : parts) {
      transfers.push_back({.sender = static_cast<int>(part.block->holder),
                           .memory = arrived_.get() + part.offset,
                           .bytes = BytesOf(part)});
    }
    ISOBIT_RETURN_IF_ERROR(senders_.Exchange(transfers));
    for (const Part& part : parts) {
      const WantedSlice& wanted = slices[part.slice];
      const int64_t width = wanted.slice.columns.size();
      const StoredMatrix from = {.values = arrived_.get() + part.offset,
                                 .stored_as = StoredAsOf(tensors_[wanted.tensor].dtype),
                                 .rows = part.rows.size(),
                                 .columns = part.columns.size(),
                                 .stride = part.columns.size()};
      Bf16* const to = wanted.to + (part.rows.begin - wanted.slice.rows.begin) * width +
                       part.columns.begin - wanted.slice.columns.begin;
      ISOBIT_RETURN_IF_ERROR(packer.Round(from, to, width));
    }
    return absl::OkStatus();
  }

  absl::Status End(const absl::Status& packed) override { return senders_.Leave(packed); }

 private:
  size_t BytesOf(const Part& part) const {
    return static_cast<size_t>(part.rows.size() * part.columns.size()) *
           ItemSize(tensors_[part.block->tensor].dtype);
  }

  void AddPart(const WantedSlice& wanted, size_t slice, const WeightBlock& block,
               std::vector<Part>& parts, size_t& bytes) {
    const auto [rows, columns] = CommonPart(wanted.slice, block);
    if (rows.size() == 0 || columns.size() == 0) return;
    parts.push_back({slice, &block, rows, columns, bytes});
    bytes += BytesOf(parts.back());
    for (const int64_t word :
         {static_cast<int64_t>(parts_.size() - 1), static_cast<int64_t>(block.tensor), rows.begin,
          rows.size(), columns.begin, columns.size()}) {
      requests_[block.holder].push_back(word);
    }
  }

  // To each sender the number of its parts, then for each the job, the tensor, its first row, rows,
  // first column and columns.
  absl::Status SendRequests() {
    std::vector<SenderTransfer> counts;
    std::vector<SenderTransfer> lists;
    size_t words = 0;
    for (const std::vector<int64_t>& list : requests_) words += 1 + list.size();
    requests_in_order_.reserve(words);
    ISOBIT_ASSIGN_OR_RETURN(sent_, packer_.Allocate(words * sizeof(int64_t)));
    for (size_t sender = 0; sender < requests_.size(); ++sender) {
      const std::vector<int64_t>& list = requests_[sender];
      std::byte* const at = sent_.get() + requests_in_order_.size() * sizeof(int64_t);
      const auto transfer = [&](std::byte* from, size_t size) {
        return SenderTransfer{static_cast<int>(sender), true, from, size * sizeof(int64_t)};
      };
      counts.push_back(transfer(at, 1));
      if (!list.empty()) lists.push_back(transfer(at + sizeof(int64_t), list.size()));
      requests_in_order_.push_back(static_cast<int64_t>(list.size() / kRequestWords));
      requests_in_order_.insert(requests_in_order_.end(), list.begin(), list.end());
    }
    ISOBIT_RETURN_IF_ERROR(
        packer_.Copy(sent_.get(), requests_in_order_.data(), words * sizeof(int64_t)));
    ISOBIT_RETURN_IF_ERROR(senders_.Exchange(counts));
    return senders_.Exchange(lists);
  }

  const std::vector<Tensor>& tensors_;
  const std::vector<std::vector<const WeightBlock*>> blocks_of_;  // [tensor]
  WeightSenders& senders_;
  DevicePacker& packer_;
  std::vector<std::vector<int64_t>> requests_;  // [sender]
  std::vector<int64_t> requests_in_order_;
  std::vector<std::vector<Part>> parts_;  // [job]
  size_t next_job_ = 0;
  Memory sent_;
  Memory arrived_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SliceSource>> ReceiveWeights(const std::vector<Tensor>& tensors,
                                                            const WeightBlocks& blocks,
                                                            const SenderGroup& group,
                                                            DevicePacker& packer) {
  if (packer.senders() == nullptr) {
    return absl::UnimplementedError("this device receives no weights by NCCL");
  }
  ISOBIT_RETURN_IF_ERROR(packer.senders()->Join(group));
  return std::make_unique<SentWeights>(tensors, blocks, group.num_senders, packer);
}

}  // namespace isobit
