// The comparator's metrics: the totals of its history, and the weights that both sides serve.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_METRICS_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_METRICS_H_

#include <memory>

#include "common/metrics/metrics.h"
#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/side_watch.h"

namespace isobit {

// `metrics` outlives the observations.
Observations ObserveHistory(Metrics& metrics, const std::shared_ptr<const History>& history);

// Which weights each side serves, and whether it answers.
Observations ObserveSides(Metrics& metrics, const std::shared_ptr<const SideWatch>& sides);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_COMPARATOR_METRICS_H_
