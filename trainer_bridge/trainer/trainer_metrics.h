// A run's metrics for Prometheus, as docs/metrics.md lists them; isobit.trainer_metrics has the
// same ones in Python. Not here: the page that serves them.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_TRAINER_METRICS_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_TRAINER_METRICS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "common/metrics/metrics.h"
#include "trainer_bridge/trainer/logprob_gap.h"

namespace isobit::trainer {

// One thread adds; any thread collects.
class TrainerMetrics {
 public:
  // The parts of a step.
  static constexpr std::array kParts = {"sample", "train", "compare", "sync"};

  TrainerMetrics();

  std::shared_ptr<const Metrics> metrics() const { return metrics_; }

  // Compares a batch's logprobs of rollout and trainer.
  void AddComparison(const LogprobGap& gap);

  // One optimizer step. reward: the mean of its samples. seconds: by part, for each of kParts.
  void AddStep(int64_t step, double reward, const std::map<std::string, double>& seconds);

 private:
  using Gauge = std::atomic<double>;

  void Observe(const std::string& name, const std::string& help, const Gauge& gauge);

  const std::shared_ptr<Metrics> metrics_ = std::make_shared<Metrics>();
  Gauge step_ = 0, reward_ = 0, staleness_ = 0, max_abs_dlogp_ = 0;
  std::array<Gauge, 3> kl_{};
  std::map<std::string, prometheus::Counter*> seconds_;  // by part
  prometheus::Histogram& sync_;
  prometheus::Counter& compared_;
  prometheus::Counter& unequal_;
  prometheus::Counter& impossible_;
  Observations observations_;  // of the gauges; the last member, since it reads them
};

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_TRAINER_METRICS_H_
