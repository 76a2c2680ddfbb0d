// isobit-numerics: says whether the GPUs of this machine compute the contract's k16 step (C1), by a
// million of them compared with the contract on the CPU, bit for bit. `isobit doctor --numerics`
// runs it.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "nlohmann/json.hpp"
#include "tools/mma_device.h"
#include "tools/mma_steps.h"

ABSL_FLAG(int64_t, steps, 1000000, "how many steps each instruction computes, rounded up");
ABSL_FLAG(uint64_t, seed, 1, "the steps' inputs follow from it");
ABSL_FLAG(bool, json, false, "print JSON");

namespace isobit {
namespace {

using nlohmann::ordered_json;

constexpr int kSame = 0;
constexpr int kDifferent = 1;
constexpr int kBadUsage = 2;
constexpr int kCannotRun = 3;

std::string Hex(const std::vector<contract::Bf16>& values) {
  std::string text;
  for (const contract::Bf16 value : values) absl::StrAppendFormat(&text, "%04x", value);
  return text;
}

std::string Hex(float value) { return absl::StrFormat("%08x", contract::BitsOf(value)); }

ordered_json Report(const std::string& instruction, const MmaComparison& comparison) {
  ordered_json families;
  for (const auto& family : comparison.families) {
    families[family.name] = {{"steps", family.steps}, {"different", family.different}};
  }
  ordered_json report = {{"instruction", instruction},
                         {"steps", comparison.steps},
                         {"different", comparison.different},
                         {"families", families}};
  if (comparison.first) {
    const DifferentStep& first = *comparison.first;
    report["first"] = {{"step", first.step},   {"family", first.family},
                       {"c", Hex(first.c)},    {"a", Hex(first.a)},
                       {"b", Hex(first.b)},    {"expected", Hex(first.expected)},
                       {"got", Hex(first.got)}};
  }
  return report;
}

absl::StatusOr<ordered_json> CheckCard(const CardInfo& card, const MmaSteps& steps,
                                       const std::vector<float>& expected) {
  ordered_json report = {{"device", card.device},
                         {"name", card.name},
                         {"compute_capability", absl::StrCat(card.major, ".", card.minor)}};
  report["instructions"] = ordered_json::array();
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<float> mma_sync, RunMmaSync(card, steps));
  const MmaComparison by_mma_sync = CompareMmaSteps(steps, expected, mma_sync);
  report["instructions"].push_back(Report("mma.sync.m16n8k16", by_mma_sync));
  bool same = by_mma_sync.different == 0;
  if (card.is_hopper()) {
    ISOBIT_ASSIGN_OR_RETURN(const std::vector<float> wgmma, RunWgmma(card, steps));
    const MmaComparison by_wgmma = CompareMmaSteps(steps, expected, wgmma);
    report["instructions"].push_back(Report("wgmma.m64n64k16", by_wgmma));
    same = same && by_wgmma.different == 0;
  }
  report["computes_contract"] = same;
  return report;
}

void PrintText(const ordered_json& report) {
  for (const ordered_json& card : report["devices"]) {
    absl::PrintF("GPU %d, %s, compute capability %s: ", card["device"].get<int>(),
                 card["name"].get<std::string>(), card["compute_capability"].get<std::string>());
    absl::PrintF("%s\n", card["computes_contract"].get<bool>()
                             ? "computes the contract (C1)"
                             : "does NOT compute the contract (C1)");
    for (const ordered_json& one : card["instructions"]) {
      absl::PrintF("  %-18s %d steps, %d differ\n", one["instruction"].get<std::string>(),
                   one["steps"].get<int64_t>(), one["different"].get<int64_t>());
      for (const auto& [name, family] : one["families"].items()) {
        const auto different = family["different"].get<int64_t>();
        if (different == 0) continue;
        absl::PrintF("    %s: %d of %d differ\n", name, different, family["steps"].get<int64_t>());
      }
      if (!one.contains("first")) continue;
      const ordered_json& first = one["first"];
      absl::PrintF("    first: c %s, a %s, b %s: expected %s, got %s\n",
                   first["c"].get<std::string>(), first["a"].get<std::string>(),
                   first["b"].get<std::string>(), first["expected"].get<std::string>(),
                   first["got"].get<std::string>());
    }
  }
}

int CannotRun(absl::string_view why) {
  if (absl::GetFlag(FLAGS_json)) {
    absl::PrintF("%s\n", ordered_json{{"error", why}}.dump(2));
  } else {
    absl::FPrintF(stderr, "isobit-numerics: %s\n", why);
  }
  return kCannotRun;
}

int Main() {
  const absl::Status in_range = RequireInRange("steps", absl::GetFlag(FLAGS_steps), 1, 1 << 28);
  if (!in_range.ok()) {
    absl::FPrintF(stderr, "isobit-numerics: %s\n", in_range.message());
    return kBadUsage;
  }
  const absl::StatusOr<std::vector<CardInfo>> cards = ListCards();
  if (!cards.ok()) return CannotRun(cards.status().message());
  if (cards->empty()) return CannotRun("no NVIDIA GPU on this machine");
  const MmaSteps steps = MakeMmaSteps(absl::GetFlag(FLAGS_steps), absl::GetFlag(FLAGS_seed));
  const std::vector<float> expected = ContractResults(steps);
  ordered_json report = {{"seed", absl::GetFlag(FLAGS_seed)}, {"devices", ordered_json::array()}};
  bool same = true;
  for (const CardInfo& card : *cards) {
    absl::StatusOr<ordered_json> checked = CheckCard(card, steps, expected);
    if (!checked.ok()) {
      return CannotRun(
          absl::StrCat("GPU ", card.device, ", ", card.name, ": ", checked.status().message()));
    }
    same = same && (*checked)["computes_contract"].get<bool>();
    report["devices"].push_back(*std::move(checked));
  }
  report["computes_contract"] = same;
  if (absl::GetFlag(FLAGS_json)) {
    absl::PrintF("%s\n", report.dump(2));
  } else {
    PrintText(report);
  }
  return same ? kSame : kDifferent;
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) {
  isobit::ParseFlagsOrExit(
      argc, argv,
      "isobit-numerics [flags]\n\n"
      "Computes a million single steps of the tensor cores of each GPU here, over all kinds of\n"
      "inputs, and compares them with the contract (docs/NUMERICS.md, C1) on the CPU, bit for "
      "bit.\n\n"
      "Exit status: 0 every GPU computes the contract, 1 one does not, 2 bad usage, 3 no GPU that\n"
      "could be asked.");
  return isobit::Main();
}
