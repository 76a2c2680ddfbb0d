// Keeps the comparator's history.
#include "trainer_bridge/comparator/history.h"

#include <algorithm>

namespace isobit {

void History::Add(const SequenceOutcome& outcome) {
  std::lock_guard<std::mutex> lock(mutex_);
  total_.Add(outcome);
  latest_.push_back(outcome);
  if (latest_.size() > kMaxWindow) latest_.pop_front();
}

v1::CompareSummary History::Window(size_t sequences) const {
  std::lock_guard<std::mutex> lock(mutex_);
  SummaryBuilder window;
  for (size_t i = latest_.size() - std::min(sequences, latest_.size()); i < latest_.size(); ++i) {
    window.Add(latest_[i]);
  }
  return window.Build();
}

v1::CompareSummary History::Total() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total_.Build();
}

double History::UptimeSeconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

}  // namespace isobit
