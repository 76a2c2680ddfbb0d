// isobit-numerics: says whether the GPUs of this machine compute the contract's k16 step (C1), by a
// million of them compared with the contract on the CPU, bit for bit. `isobit doctor --numerics`
// runs it.
#include <algorithm>
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

struct Asked {
  const char* instruction;
  MmaComparison comparison;
};

// What one card computed.
struct CardReport {
  CardInfo card;
  std::vector<Asked> asked;

  bool computes_contract() const {
    return std::all_of(asked.begin(), asked.end(),
                       [](const Asked& one) { return one.comparison.different == 0; });
  }
};

std::string Hex(const std::vector<contract::Bf16>& values) {
  std::string text;
  for (const contract::Bf16 value : values) absl::StrAppendFormat(&text, "%04x", value);
  return text;
}

std::string Hex(float value) { return absl::StrFormat("%08x", contract::BitsOf(value)); }

ordered_json ToJson(const Asked& asked) {
  const MmaComparison& comparison = asked.comparison;
  ordered_json families;
  for (const auto& family : comparison.families) {
    families[family.name] = {{"steps", family.steps}, {"different", family.different}};
  }
  ordered_json json = {{"instruction", asked.instruction},
                       {"steps", comparison.steps},
                       {"different", comparison.different},
                       {"families", families}};
  if (comparison.first) {
    const DifferentStep& first = *comparison.first;
    json["first"] = {{"step", first.step},   {"family", first.family},
                     {"c", Hex(first.c)},    {"a", Hex(first.a)},
                     {"b", Hex(first.b)},    {"expected", Hex(first.expected)},
                     {"got", Hex(first.got)}};
  }
  return json;
}

ordered_json ToJson(const std::vector<CardReport>& reports, bool same) {
  ordered_json devices = ordered_json::array();
  for (const CardReport& report : reports) {
    ordered_json instructions = ordered_json::array();
    for (const Asked& asked : report.asked) instructions.push_back(ToJson(asked));
    const CardInfo& card = report.card;
    devices.push_back({{"device", card.device},
                       {"name", card.name},
                       {"compute_capability", absl::StrCat(card.major, ".", card.minor)},
                       {"instructions", instructions},
                       {"computes_contract", report.computes_contract()}});
  }
  return {{"seed", absl::GetFlag(FLAGS_seed)}, {"devices", devices}, {"computes_contract", same}};
}

absl::StatusOr<CardReport> CheckCard(const CardInfo& card, const MmaSteps& steps,
                                     const std::vector<float>& expected) {
  CardReport report = {card, {}};
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<float> mma_sync, RunMmaSync(card, steps));
  report.asked.push_back({"mma.sync.m16n8k16", CompareMmaSteps(steps, expected, mma_sync)});
  if (card.is_hopper()) {
    ISOBIT_ASSIGN_OR_RETURN(const std::vector<float> wgmma, RunWgmma(card, steps));
    report.asked.push_back({"wgmma.m64n64k16", CompareMmaSteps(steps, expected, wgmma)});
  }
  return report;
}

void PrintText(const CardReport& report) {
  const CardInfo& card = report.card;
  absl::PrintF("GPU %d, %s, compute capability %d.%d: %s the contract (C1)\n", card.device,
               card.name, card.major, card.minor,
               report.computes_contract() ? "computes" : "does NOT compute");
  for (const Asked& asked : report.asked) {
    const MmaComparison& comparison = asked.comparison;
    absl::PrintF("  %-18s %d steps, %d differ\n", asked.instruction, comparison.steps,
                 comparison.different);
    for (const auto& family : comparison.families) {
      if (family.different == 0) continue;
      absl::PrintF("    %s: %d of %d differ\n", family.name, family.different, family.steps);
    }
    if (!comparison.first) continue;
    const DifferentStep& first = *comparison.first;
    absl::PrintF("    first: c %s, a %s, b %s: expected %s, got %s\n", Hex(first.c), Hex(first.a),
                 Hex(first.b), Hex(first.expected), Hex(first.got));
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
  std::vector<CardReport> reports;
  bool same = true;
  for (const CardInfo& card : *cards) {
    absl::StatusOr<CardReport> checked = CheckCard(card, steps, expected);
    if (!checked.ok()) {
      return CannotRun(
          absl::StrCat("GPU ", card.device, ", ", card.name, ": ", checked.status().message()));
    }
    same = same && checked->computes_contract();
    reports.push_back(*std::move(checked));
  }
  if (absl::GetFlag(FLAGS_json)) {
    absl::PrintF("%s\n", ToJson(reports, same).dump(2));
  } else {
    std::for_each(reports.begin(), reports.end(), PrintText);
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
