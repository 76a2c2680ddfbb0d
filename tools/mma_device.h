// Runs single k16 steps on a GPU's tensor cores. See mma_steps.h.
#ifndef ISOBIT_TOOLS_MMA_DEVICE_H_
#define ISOBIT_TOOLS_MMA_DEVICE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/mma_steps.h"

namespace isobit {

struct CardInfo {
  int device = 0;  // CUDA's number
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;

  bool is_hopper() const { return major == 9 && minor == 0; }
};

// FAILED_PRECONDITION: no driver, or one that is too old. Empty: a driver, but no GPU.
absl::StatusOr<std::vector<CardInfo>> ListCards();

// One result a step, by mma.sync.m16n8k16 on any card from compute capability 8.0.
absl::StatusOr<std::vector<float>> RunMmaSync(const CardInfo& card, const MmaSteps& steps);

// By wgmma.m64n64k16. FAILED_PRECONDITION: only Hopper has it.
absl::StatusOr<std::vector<float>> RunWgmma(const CardInfo& card, const MmaSteps& steps);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_MMA_DEVICE_H_
