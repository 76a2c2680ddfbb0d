// A service's counters and histograms, as Prometheus metrics. An update is one atomic operation.
// Not here: the page that serves them.
//
//   prometheus::Counter& tokens = metrics.AddCounter("isobit_tokens_generated_total", "...");
//   tokens.Increment();
//
// Names begin with isobit_ and consist of lower-case letters, digits and underscores. They end with
// a base unit: seconds, bytes. Names of counters, and no others, end with _total.
#ifndef ISOBIT_COMMON_METRICS_METRICS_H_
#define ISOBIT_COMMON_METRICS_METRICS_H_

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/labels.h>
#include <prometheus/metric_family.h>
#include <prometheus/metric_type.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace isobit {

// All metrics of one process. Thread-safe. Each name has one type and one help text. Labels tell
// its series apart; their values are few and known in advance, never taken from clients.
class Metrics final : public prometheus::Collectable {
 public:
  // While it exists, Collect reports its figure. Metrics must outlive it.
  class Observation {
   public:
    ~Observation() { metrics_.Forget(id_); }
    Observation(const Observation&) = delete;
    Observation& operator=(const Observation&) = delete;

   private:
    friend class Metrics;
    Observation(Metrics& metrics, uint64_t id) : metrics_(metrics), id_(id) {}

    Metrics& metrics_;
    const uint64_t id_;
  };

  // Figures that the caller updates; they live as long as this object. Calls with the same name and
  // labels return the same counter or histogram.
  prometheus::Counter& AddCounter(const std::string& name, const std::string& help,
                                  const prometheus::Labels& labels = {});
  // bounds: ascending upper bounds of the buckets; a bucket without a bound is added.
  prometheus::Histogram& AddHistogram(const std::string& name, const std::string& help,
                                      const std::vector<double>& bounds,
                                      const prometheus::Labels& labels = {});

  // A figure that is kept elsewhere. Collect calls `read`, on any thread, but not after the
  // observation is destroyed. `read` must not use this object. type: Counter or Gauge.
  [[nodiscard]] std::unique_ptr<Observation> Observe(prometheus::MetricType type,
                                                     const std::string& name,
                                                     const std::string& help,
                                                     std::function<double()> read,
                                                     prometheus::Labels labels = {});

  // All figures, each read at some moment during the call.
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  struct Observed {
    prometheus::MetricType type;
    std::string name;
    std::string help;
    prometheus::Labels labels;
    std::function<double()> read;
  };

  void Forget(uint64_t id);

  prometheus::Registry registry_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Observed> observed_;  // by id, guarded by mutex_
  uint64_t next_id_ = 0;                   // guarded by mutex_
};

// The observations of one service.
using Observations = std::vector<std::unique_ptr<Metrics::Observation>>;

// Bucket bounds for durations in seconds, from a millisecond to ten minutes.
std::vector<double> SecondsBounds();

}  // namespace isobit

#endif  // ISOBIT_COMMON_METRICS_METRICS_H_
