// Keeps the comparator's history.
#include "trainer_bridge/comparator/history.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace isobit {
namespace {

using SystemClock = std::chrono::system_clock;

template <typename T>
void Append(std::deque<T>& items, T item, size_t most) {
  items.push_back(std::move(item));
  if (items.size() > most) items.pop_front();
}

}  // namespace

void History::Add(const SequenceOutcome& outcome) {
  const Time now = SystemClock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  ++revision_;
  total_.Add(outcome);
  Append(latest_, outcome, kMaxWindow);
  AddToSecond(outcome, now);
  AddToWorst(outcome, now);
}

void History::AddToSecond(const SequenceOutcome& outcome, Time now) {
  const int64_t unix_time =
      std::chrono::duration_cast<std::chrono::seconds>(now.time_since_epoch()).count();
  // A clock that was set back adds to the latest second.
  if (seconds_.empty() || seconds_.back().unix_time < unix_time) {
    Append(seconds_, {.unix_time = unix_time}, kMaxSeconds);
  }
  seconds_.back().revision = revision_;
  seconds_.back().statistics.Merge(outcome.statistics);
}

void History::AddToWorst(const SequenceOutcome& outcome, Time now) {
  for (const v1::TokenGap& gap : outcome.worst) {
    const auto place = std::upper_bound(
        worst_.begin(), worst_.end(), gap,
        [](const v1::TokenGap& a, const WorstToken& b) { return IsWorse(a, b.gap); });
    if (place - worst_.begin() >= static_cast<ptrdiff_t>(kMaxWorst)) break;
    worst_.insert(place, {.sequence_id = outcome.sequence_id, .gap = gap, .time = now});
    if (worst_.size() > kMaxWorst) worst_.pop_back();
  }
}

void History::Refuse(const absl::Status& why, uint64_t num_missing_tokens) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++revision_;
  ++num_refused_;
  num_missing_ += num_missing_tokens;
  // Callers choose some of the text.
  Append(refusals_, {.why = absl::StrCat(why.message().substr(0, 512)), .time = SystemClock::now()},
         kMaxRefusals);
}

void History::AddMark(const std::string& side, const v1::WeightVersion& version) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++revision_;
  Append(marks_, {.side = side, .version = version, .time = SystemClock::now()}, kMaxMarks);
}

History::Comparison History::Begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++revision_;
  ++num_open_;
  return Comparison(this, [](History* history) {
    std::lock_guard<std::mutex> end_lock(history->mutex_);
    ++history->revision_;
    --history->num_open_;
  });
}

v1::CompareSummary History::Window(size_t sequences) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return WindowLocked(sequences);
}

v1::CompareSummary History::WindowLocked(size_t sequences) const {
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

History::View History::Look(size_t window, size_t sequences, uint64_t revision) const {
  std::lock_guard<std::mutex> lock(mutex_);
  View view;
  view.revision = revision_;
  view.total = total_.Build();
  view.window = WindowLocked(window);
  const size_t shown = std::min(sequences, latest_.size());
  view.sequences.assign(latest_.end() - static_cast<ptrdiff_t>(shown), latest_.end());
  view.worst = worst_;
  std::copy_if(seconds_.begin(), seconds_.end(), std::back_inserter(view.seconds),
               [&](const Second& second) { return second.revision > revision; });
  view.refusals.assign(refusals_.begin(), refusals_.end());
  view.marks.assign(marks_.begin(), marks_.end());
  view.num_missing = num_missing_;
  view.num_refused = num_refused_;
  view.num_open = num_open_;
  view.uptime_seconds = UptimeSeconds();
  return view;
}

uint64_t History::revision() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return revision_;
}

uint64_t History::num_missing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_missing_;
}

uint64_t History::num_refused() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_refused_;
}

double History::UptimeSeconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

}  // namespace isobit
