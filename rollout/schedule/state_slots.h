// Which slots are free and how many hold each of the others. A slot keeps what a model's recurrent
// blocks know of one sequence (kernels/blocks/block.h). Its memory is in kernels/model's KvCache.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_STATE_SLOTS_H_
#define ISOBIT_ROLLOUT_SCHEDULE_STATE_SLOTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/ops/sequences.h"

namespace isobit {

// Not thread-safe. Slots are numbered from 1.
class StateSlots {
 public:
  // rows: as StateSpec::slot_rows. num_slots 0: the model has no slots.
  StateSlots(int32_t num_slots, int32_t rows);

  bool exist() const { return !counts_.empty(); }
  // A free slot, held once; kNoSlot: none is free.
  int32_t Take();
  void Share(int32_t slot) { ++counts_[Index(slot)]; }
  void Release(int32_t slot);
  bool IsShared(int32_t slot) const { return counts_[Index(slot)] > 1; }

  // Like Release, but at the next BeginStep. For what the coming step reads: until it is planned,
  // no other sequence may take the slot and write to it.
  void ReleaseAfterStep(int32_t slot) { read_.push_back(slot); }
  void BeginStep();

  // Whether a slot that has been extended to row `extended_to` serves to go on from row `row`.
  bool Serves(int64_t extended_to, int64_t row) const {
    return row == extended_to || row / rows_ == extended_to / rows_;
  }

 private:
  static size_t Index(int32_t slot) { return static_cast<size_t>(slot) - 1; }

  const int32_t rows_;
  std::vector<int32_t> counts_;  // by slot: who holds it
  std::vector<int32_t> free_;    // a stack
  std::vector<int32_t> read_;    // by the coming step
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_STATE_SLOTS_H_
