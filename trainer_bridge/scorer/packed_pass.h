// The rows of one rank's pass: its sequences end to end, without padding. If a sequence begins like
// an earlier one of the pass, these tokens are computed only once: the sequence reads the earlier
// one's state and has the same hidden rows.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_PACKED_PASS_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_PACKED_PASS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/model/transformer.h"
#include "trainer_bridge/scorer/score_job.h"

namespace isobit {

class PackedPass {
 public:
  // sharing: false computes every sequence whole. has_slots: of the model. The rows of a sequence
  // are then cut where another one goes on, and leave their state there in a slot.
  PackedPass(absl::Span<const ScoreItem> items, bool sharing, bool has_slots);
  PackedPass(const PackedPass&) = delete;  // the batch points to the page tables
  PackedPass& operator=(const PackedPass&) = delete;

  // The batch to compute. A sequence whose pages are all shared is not in it.
  const Batch& batch() const { return batch_; }
  int64_t num_rows() const { return static_cast<int64_t>(batch_.ids.size()); }
  int64_t num_pages() const { return static_cast<int64_t>(row_of_page_.size()); }
  int32_t num_slots() const { return num_slots_; }

  // The batch row that computes the token at `position` of items[item].
  int64_t RowOf(size_t item, int64_t position) const;

 private:
  void CutForSlots();

  Batch batch_;
  int32_t num_slots_ = 0;
  std::vector<int32_t> pages_;        // the page tables of all items, one after another
  std::vector<size_t> first_page_;    // of each item, in pages_
  std::vector<int64_t> row_of_page_;  // [pages]: the row of a page's first token
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PACKED_PASS_H_
