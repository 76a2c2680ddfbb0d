// The flags and the report that the GPU subcommands of isobit-bench share.
#ifndef ISOBIT_BENCH_KERNELS_REPORT_H_
#define ISOBIT_BENCH_KERNELS_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "bench/kernels/harness.h"
#include "nlohmann/json.hpp"

namespace isobit::bench {

// What --rounds and --quick ask for.
RacePlan PlanOfFlags();
bool Quick();

// The numbers of a list flag, each from 1 to `most`. INVALID_ARGUMENT names the flag.
absl::StatusOr<std::vector<int64_t>> Numbers(const char* flag,
                                             const std::vector<std::string>& texts, int64_t most);

double GeometricMean(const std::vector<double>& values);

// The machine, as the report's first entries.
nlohmann::json MachineReport(const Harness& harness);
// Writes the report to --json, if that is set. INVALID_ARGUMENT: it cannot be written.
absl::Status WriteReport(const nlohmann::json& report);

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_REPORT_H_
