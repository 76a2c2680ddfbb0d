// Reads one value of a service's metrics.
#ifndef ISOBIT_TESTS_SUPPORT_METRIC_VALUE_H_
#define ISOBIT_TESTS_SUPPORT_METRIC_VALUE_H_

#include <cmath>
#include <string>

#include "common/metrics/metrics.h"

namespace isobit::testing_support {

// The value of a counter or gauge, or the number of observations of a histogram. NaN: there is no
// metric of that name with those labels.
inline double MetricValue(const Metrics& metrics, const std::string& name,
                          const prometheus::Labels& labels = {}) {
  for (const prometheus::MetricFamily& family : metrics.Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      prometheus::Labels found;
      for (const auto& label : metric.label) found[label.name] = label.value;
      if (family.name != name || found != labels) continue;
      switch (family.type) {
        case prometheus::MetricType::Counter:
          return metric.counter.value;
        case prometheus::MetricType::Histogram:
          return static_cast<double>(metric.histogram.sample_count);
        default:
          return metric.gauge.value;
      }
    }
  }
  return std::nan("");
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_METRIC_VALUE_H_
