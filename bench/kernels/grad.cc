// The subcommand `grad` of isobit-bench: the ops of a training step, by families.
#include "bench/kernels/grad.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/gpu.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"

ABSL_FLAG(std::vector<std::string>, families,
          std::vector<std::string>({"products", "attention", "rows"}),
          "grad: families of ops: products (of linear layers, beside cuBLAS), attention, rows (the "
          "row-wise ops, logprobs and the optimizer, beside the copy rate)");

namespace isobit::bench {
namespace {

struct Family {
  const char* name;
  absl::Status (*run)(Harness& harness, nlohmann::json& report);
};
constexpr Family kFamilies[] = {
    {"products", BenchProducts}, {"attention", BenchTrainingAttention}, {"rows", BenchRows}};

}  // namespace

absl::Status BenchGrad() {
  const std::vector<std::string> names = absl::GetFlag(FLAGS_families);
  for (const std::string& name : names) {
    if (std::ranges::find(kFamilies, name, &Family::name) == std::end(kFamilies)) {
      return absl::InvalidArgumentError(absl::StrCat("--families names \"", name, "\""));
    }
  }
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Harness> harness, Harness::Create());
  absl::PrintF("%s", harness->Describe());
  nlohmann::json report = MachineReport(*harness);
  for (const Family& family : kFamilies) {
    if (std::ranges::count(names, family.name) == 0) continue;
    ISOBIT_RETURN_IF_ERROR(family.run(*harness, report));
  }
  return WriteReport(report);
}

}  // namespace isobit::bench
