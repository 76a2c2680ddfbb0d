// The common metrics' names and help texts.
#include "common/rpc/service_metrics.h"

#include <utility>

namespace isobit {

using prometheus::MetricType;

std::unique_ptr<Metrics::Observation> ObserveWeightVersion(Metrics& metrics,
                                                           std::function<uint64_t()> version) {
  return metrics.Observe(MetricType::Gauge, "isobit_weight_version",
                         "Id of the weights that serve; 0: none yet.",
                         [version = std::move(version)] { return static_cast<double>(version()); });
}

std::unique_ptr<Metrics::Observation> ObserveHeldBytes(Metrics& metrics, const std::string& of,
                                                       std::shared_ptr<const ByteBudget> budget) {
  return metrics.Observe(
      MetricType::Gauge, "isobit_held_bytes", "Memory that clients make the service hold.",
      [budget = std::move(budget)] { return static_cast<double>(budget->held()); }, {{"of", of}});
}

prometheus::Histogram& AddWeightUpdateSeconds(Metrics& metrics) {
  return metrics.AddHistogram("isobit_weight_update_seconds",
                              "From the start of an update of weights to the switch.",
                              SecondsBounds());
}

}  // namespace isobit
