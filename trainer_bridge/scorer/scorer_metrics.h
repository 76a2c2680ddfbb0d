// The scorer's metrics.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_METRICS_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_METRICS_H_

#include <memory>

#include "common/access/held_bytes.h"
#include "common/metrics/metrics.h"
#include "trainer_bridge/scorer/scorer.h"

namespace isobit {

struct ScorerMetrics {
  // `metrics` outlives it.
  ScorerMetrics(Metrics& metrics, const std::shared_ptr<const ByteBudget>& calls);

  // Call it once the scorer has loaded. `scorer` outlives the observations.
  static Observations Observe(Metrics& metrics, const Scorer& scorer);

  prometheus::Counter& tokens;            // scored
  prometheus::Histogram& update_seconds;  // of weights
  const std::unique_ptr<Metrics::Observation> held_bytes;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORER_METRICS_H_
