// Families of counters and histograms, collected when Prometheus asks.
#include "common/metrics/metrics.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "common/base/check.h"

namespace isobit {
namespace {

void CheckName(const std::string& name, prometheus::MetricType type) {
  ISOBIT_CHECK(absl::StartsWith(name, "isobit_")) << name << ": expected the prefix isobit_";
  for (const char c : name) {
    ISOBIT_CHECK(absl::ascii_islower(static_cast<unsigned char>(c)) ||
                 absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '_')
        << name << ": expected lower-case letters, digits and underscores";
  }
  ISOBIT_CHECK(absl::EndsWith(name, "_total") == (type == prometheus::MetricType::Counter))
      << name << ": expected _total at the end of a counter's name, and of no other";
}

prometheus::ClientMetric SampleOf(prometheus::MetricType type, const prometheus::Labels& labels,
                                  double value) {
  prometheus::ClientMetric sample;
  for (const auto& [name, text] : labels) sample.label.push_back({name, text});
  if (type == prometheus::MetricType::Counter) {
    sample.counter.value = value;
  } else {
    sample.gauge.value = value;
  }
  return sample;
}

}  // namespace

prometheus::Counter& Metrics::AddCounter(const std::string& name, const std::string& help,
                                         const prometheus::Labels& labels) {
  CheckName(name, prometheus::MetricType::Counter);
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry_).Add(labels);
}

prometheus::Histogram& Metrics::AddHistogram(const std::string& name, const std::string& help,
                                             const std::vector<double>& bounds,
                                             const prometheus::Labels& labels) {
  CheckName(name, prometheus::MetricType::Histogram);
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry_).Add(labels, bounds);
}

std::unique_ptr<Metrics::Observation> Metrics::Observe(prometheus::MetricType type,
                                                       const std::string& name,
                                                       const std::string& help,
                                                       std::function<double()> read,
                                                       prometheus::Labels labels) {
  CheckName(name, type);
  const std::lock_guard lock(mutex_);
  const uint64_t id = next_id_++;
  observed_[id] = {type, name, help, std::move(labels), std::move(read)};
  return std::unique_ptr<Observation>(new Observation(*this, id));
}

void Metrics::Forget(uint64_t id) {
  const std::lock_guard lock(mutex_);
  observed_.erase(id);
}

std::vector<prometheus::MetricFamily> Metrics::Collect() const {
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  const std::lock_guard lock(mutex_);
  for (const auto& [id, observed] : observed_) {
    auto family =
        std::find_if(families.begin(), families.end(),
                     [name = observed.name](const auto& known) { return known.name == name; });
    if (family == families.end()) {
      families.push_back(
          {.name = observed.name, .help = observed.help, .type = observed.type, .metric = {}});
      family = families.end() - 1;
    }
    family->metric.push_back(SampleOf(observed.type, observed.labels, observed.read()));
  }
  return families;
}

std::vector<double> SecondsBounds() {
  return {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600};
}

}  // namespace isobit
