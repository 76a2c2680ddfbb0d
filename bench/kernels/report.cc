// Reads the shared flags, and writes --json with what is known of the machine.
#include "bench/kernels/report.h"

#include <cmath>
#include <fstream>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

ABSL_FLAG(int, rounds, 7, "gemm, attention, ops: rounds; their median is reported");
ABSL_FLAG(bool, quick, false, "gemm, attention, ops, allreduce: a few cases, 3 short rounds each");
ABSL_FLAG(std::string, json, "",
          "gemm, attention, ops, allreduce: a file to write every figure to");

namespace isobit::bench {

bool Quick() { return absl::GetFlag(FLAGS_quick); }

RacePlan PlanOfFlags() {
  if (Quick()) return {.rounds = 3, .slot_us = 800};
  return {.rounds = std::max(1, absl::GetFlag(FLAGS_rounds)), .slot_us = 1500};
}

absl::StatusOr<std::vector<int64_t>> Numbers(const char* flag,
                                             const std::vector<std::string>& texts, int64_t most) {
  std::vector<int64_t> numbers;
  for (const std::string& text : texts) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number) || number < 1 || number > most) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, " has \"", text, "\", expected numbers from 1 to ", most));
    }
    numbers.push_back(number);
  }
  return numbers;
}

double GeometricMean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += std::log(value);
  return std::exp(sum / static_cast<double>(values.size()));
}

nlohmann::json MachineReport(const Harness& harness) {
  return {{"machine", harness.Describe()},
          {"copy_gb_per_s", harness.copy_rate() / 1e9},
          {"tensor_tflop_per_s", harness.tensor_rate() / 1e12}};
}

absl::Status WriteReport(const nlohmann::json& report) {
  const std::string path = absl::GetFlag(FLAGS_json);
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path);
  file << report.dump(1) << "\n";
  file.close();
  if (file.fail()) {
    return absl::InvalidArgumentError(absl::StrCat("--json: cannot write \"", path, "\""));
  }
  return absl::OkStatus();
}

}  // namespace isobit::bench
