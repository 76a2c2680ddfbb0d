// Counts.
#include "rollout/schedule/state_slots.h"

#include "common/base/check.h"

namespace isobit {

StateSlots::StateSlots(int32_t num_slots, int32_t rows)
    : rows_(rows), counts_(static_cast<size_t>(num_slots)) {
  ISOBIT_CHECK(num_slots == 0 || rows > 0) << num_slots << " slots, " << rows << " rows";
  for (int32_t slot = num_slots; slot > 0; --slot) free_.push_back(slot);
}

int32_t StateSlots::Take() {
  if (free_.empty()) return kNoSlot;
  const int32_t slot = free_.back();
  free_.pop_back();
  counts_[Index(slot)] = 1;
  return slot;
}

void StateSlots::Release(int32_t slot) {
  ISOBIT_CHECK(counts_[Index(slot)] > 0) << "slot " << slot << " freed twice";
  if (--counts_[Index(slot)] == 0) free_.push_back(slot);
}

void StateSlots::BeginStep() {
  for (const int32_t slot : read_) Release(slot);
  read_.clear();
}

}  // namespace isobit
