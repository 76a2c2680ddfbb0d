// The comparator's metrics: the totals of its history.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_METRICS_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_METRICS_H_

#include <memory>

#include "common/metrics/metrics.h"
#include "trainer_bridge/comparator/history.h"

namespace isobit {

// `metrics` outlives the observations.
Observations ObserveHistory(Metrics& metrics, const std::shared_ptr<const History>& history);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_METRICS_H_
