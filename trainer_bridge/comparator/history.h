// The sequences compared so far: the latest ones one by one, and the total of all. Thread-safe.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_HISTORY_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_HISTORY_H_

#include <chrono>
#include <cstddef>
#include <deque>
#include <mutex>

#include "isobit/v1/comparator.pb.h"
#include "trainer_bridge/comparator/report.h"

namespace isobit {

class History {
 public:
  // The longest window; older sequences count in the total alone.
  static constexpr size_t kMaxWindow = 4096;

  void Add(const SequenceOutcome& outcome);

  // The latest `sequences` sequences, in the order of Add.
  v1::CompareSummary Window(size_t sequences) const;

  v1::CompareSummary Total() const;

  double UptimeSeconds() const;

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();

  mutable std::mutex mutex_;
  std::deque<SequenceOutcome> latest_;  // guarded by mutex_
  SummaryBuilder total_;                // guarded by mutex_
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_HISTORY_H_
