// The rollout's metrics.
#ifndef ISOBIT_ROLLOUT_SERVICE_ROLLOUT_METRICS_H_
#define ISOBIT_ROLLOUT_SERVICE_ROLLOUT_METRICS_H_

#include "common/metrics/metrics.h"
#include "rollout/engine/engine.h"
#include "rollout/service/generate_stream.h"

namespace isobit {

struct RolloutMetrics {
  // `metrics` and `engine` outlive it.
  RolloutMetrics(Metrics& metrics, const Engine& engine, const StreamMemory& memory);

  const GenerationMetrics generation;
  prometheus::Histogram& update_seconds;  // of weights
  const Observations observations;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_ROLLOUT_METRICS_H_
