// The sequences compared so far: the latest one by one, the worst tokens, counts per second and
// totals; also refused comparisons and changes of weights. Thread-safe.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_HISTORY_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_HISTORY_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "isobit/v1/comparator.pb.h"
#include "trainer_bridge/comparator/report.h"

namespace isobit {

class History {
 public:
  using Time = std::chrono::system_clock::time_point;

  // The longest window; older sequences count only in the total.
  static constexpr size_t kMaxWindow = 4096;
  // Bounds of everything else. The latest entries are kept; of tokens, the worst.
  static constexpr size_t kMaxSeconds = 10000;
  static constexpr size_t kMaxWorst = 24;
  static constexpr size_t kMaxRefusals = 16;
  static constexpr size_t kMaxMarks = 256;

  // A second in which sequences were compared.
  struct Second {
    int64_t unix_time = 0;
    uint64_t revision = 0;  // of its last change
    GapStatistics statistics{};
  };
  struct WorstToken {
    std::string sequence_id;
    v1::TokenGap gap;
    Time time;
  };
  struct Refusal {
    std::string why;
    Time time;
  };
  // A change of a side's weights.
  struct Mark {
    std::string side;  // "rollout" or "scorer"
    v1::WeightVersion version;
    Time time;
  };
  // Everything at one moment.
  struct View {
    uint64_t revision = 0;  // ascends with every change
    v1::CompareSummary total;
    v1::CompareSummary window;
    std::vector<SequenceOutcome> sequences;  // the latest, from old to new
    std::vector<WorstToken> worst;           // worst first
    std::vector<Second> seconds;             // ascending
    std::vector<Refusal> refusals;           // from old to new, as marks
    std::vector<Mark> marks;
    uint64_t num_missing = 0;  // tokens that lack a logprob on a side
    uint64_t num_refused = 0;  // refused comparisons
    int64_t num_open = 0;      // running comparisons
    double uptime_seconds = 0;
  };
  // A comparison counts as running while this lives.
  using Comparison = std::shared_ptr<void>;

  void Add(const SequenceOutcome& outcome);

  // Records a comparison that was refused because the sides or the sequences do not match.
  void Refuse(const absl::Status& why, uint64_t num_missing_tokens = 0);

  void AddMark(const std::string& side, const v1::WeightVersion& version);

  // The history must outlive the result.
  Comparison Begin();

  // Summary of the latest `sequences` sequences, in the order of Add.
  v1::CompareSummary Window(size_t sequences) const;

  v1::CompareSummary Total() const;

  // Includes seconds only if they have changed since `revision`; 0: all seconds.
  View Look(size_t window, size_t sequences, uint64_t revision) const;
  uint64_t revision() const;
  uint64_t num_missing() const;
  uint64_t num_refused() const;

  double UptimeSeconds() const;

 private:
  // The caller holds mutex_.
  v1::CompareSummary WindowLocked(size_t sequences) const;
  void AddToSecond(const SequenceOutcome& outcome, Time now);
  void AddToWorst(const SequenceOutcome& outcome, Time now);

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();

  mutable std::mutex mutex_;  // guards all below
  uint64_t revision_ = 0;
  std::deque<SequenceOutcome> latest_;
  SummaryBuilder total_;
  std::deque<Second> seconds_;
  std::vector<WorstToken> worst_;
  std::deque<Refusal> refusals_;
  std::deque<Mark> marks_;
  uint64_t num_missing_ = 0;
  uint64_t num_refused_ = 0;
  int64_t num_open_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_HISTORY_H_
