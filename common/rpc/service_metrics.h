// Metrics that several services have, under one name each.
#ifndef ISOBIT_COMMON_RPC_SERVICE_METRICS_H_
#define ISOBIT_COMMON_RPC_SERVICE_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/access/held_bytes.h"
#include "common/metrics/metrics.h"

namespace isobit {

// isobit_weight_version; version() is 0 before the first load.
std::unique_ptr<Metrics::Observation> ObserveWeightVersion(Metrics& metrics,
                                                           std::function<uint64_t()> version);

// isobit_held_bytes{of="..."}.
std::unique_ptr<Metrics::Observation> ObserveHeldBytes(Metrics& metrics, const std::string& of,
                                                       std::shared_ptr<const ByteBudget> budget);

// isobit_weight_update_seconds: how long completed updates took.
prometheus::Histogram& AddWeightUpdateSeconds(Metrics& metrics);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVICE_METRICS_H_
