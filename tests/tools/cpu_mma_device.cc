// Plays the cards of mma_device.h on the CPU, so that the program isobit-numerics runs in tests
// without a GPU. The environment variable CPU_CARDS lists them: `hopper`, `wrong` (Hopper with one
// wrong bit in a step of wgmma), `ampere` (two k8 steps, no wgmma) or `broken` (its driver fails),
// separated by commas.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "tools/mma_device.h"

namespace isobit {
namespace {

constexpr size_t kWrongStep = 5000;

// A chain of two steps with eight products each.
float TwoHalves(float c, const contract::Bf16* a, const contract::Bf16* b) {
  for (int first = 0; first < contract::kMmaK; first += 8) {
    std::array<contract::Bf16, contract::kMmaK> half{};
    std::copy_n(a + first, 8, half.begin());
    std::array<contract::Bf16, contract::kMmaK> other{};
    std::copy_n(b + first, 8, other.begin());
    c = contract::Mma16(c, half.data(), other.data());
  }
  return c;
}

}  // namespace

absl::StatusOr<std::vector<CardInfo>> ListCards() {
  const char* const listed = std::getenv("CPU_CARDS");
  std::vector<CardInfo> cards;
  if (listed == nullptr) return absl::FailedPreconditionError("no driver");
  const std::vector<std::string> names = absl::StrSplit(listed, ',', absl::SkipEmpty());
  for (const std::string& name : names) {
    cards.push_back({static_cast<int>(cards.size()), name, name == "ampere" ? 8 : 9, 0});
  }
  return cards;
}

absl::StatusOr<std::vector<float>> RunMmaSync(const CardInfo& card, const MmaSteps& steps) {
  if (card.name == "broken") return absl::InternalError("the driver fails");
  if (card.name != "ampere") return ContractResults(steps);
  std::vector<float> results;
  for (int64_t s = 0; s < steps.steps(); ++s) {
    results.push_back(TwoHalves(steps.c[static_cast<size_t>(s)], steps.StepA(s), steps.StepB(s)));
  }
  return results;
}

absl::StatusOr<std::vector<float>> RunWgmma(const CardInfo& card, const MmaSteps& steps) {
  std::vector<float> results = ContractResults(steps);
  if (card.name == "wrong") {
    results[kWrongStep] = contract::FromBits(contract::BitsOf(results[kWrongStep]) ^ 1u);
  }
  return results;
}

}  // namespace isobit
