// Single k16 steps (C1) for a comparison of a GPU's tensor cores with the contract: their inputs,
// what the contract says, and where results differ. No CUDA here; mma_device.h runs the steps.
#ifndef ISOBIT_TOOLS_MMA_STEPS_H_
#define ISOBIT_TOOLS_MMA_STEPS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/contract/mma16.h"

namespace isobit {

// Steps come in tiles, as the instructions take them: 64 rows of a times 64 rows of b are 64 * 64
// steps, each with a c of its own. Step s is element (s / 64 % 64, s % 64) of tile s / 4096. All
// steps of a tile are of one family of inputs; tile t is of family t % families.
inline constexpr int kTileRows = 64;
inline constexpr int kStepsPerTile = kTileRows * kTileRows;
inline constexpr int kOperandsPerTile = kTileRows * contract::kMmaK;

struct MmaSteps {
  std::vector<contract::Bf16> a;  // [tiles, 64, 16]
  std::vector<contract::Bf16> b;  // [tiles, 64, 16]
  std::vector<float> c;           // [tiles, 64, 64]

  int64_t steps() const { return static_cast<int64_t>(c.size()); }
  const contract::Bf16* StepA(int64_t step) const;
  const contract::Bf16* StepB(int64_t step) const;
};

// What the families of inputs are: values near 1, every exponent, any bit pattern, subnormals,
// zeros, cancellation, truncation, overflow, infinities, NaN.
const std::vector<std::string>& MmaFamilies();

// At least `steps` steps, rounded up to whole tiles and so that every family has as many. The same
// seed gives the same steps.
MmaSteps MakeMmaSteps(int64_t steps, uint64_t seed);

// What C1 gives for each step.
std::vector<float> ContractResults(const MmaSteps& steps);

struct DifferentStep {
  int64_t step;
  std::string family;
  float c, expected, got;
  std::vector<contract::Bf16> a, b;
};

struct MmaComparison {
  struct Family {
    std::string name;
    int64_t steps = 0;
    int64_t different = 0;
  };
  std::vector<Family> families;
  int64_t steps = 0;
  int64_t different = 0;
  std::optional<DifferentStep> first;
};

// Compares bit patterns, those of NaN too. `expected` and `got` have one result a step.
MmaComparison CompareMmaSteps(const MmaSteps& steps, const std::vector<float>& expected,
                              const std::vector<float>& got);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_MMA_STEPS_H_
