// Gradient clipping and AdamW for the C++ trainer (C15). The Python versions are
// python/isobit/torch/clip.py and adamw.py.
#ifndef ISOBIT_TRAINER_BRIDGE_FRONT_OPTIMIZER_H_
#define ISOBIT_TRAINER_BRIDGE_FRONT_OPTIMIZER_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit::front {

// bf16 parameters with fp32 gradients (KeepFp32Gradient), and their names for errors. A parameter
// without a gradient is left unchanged. c10::Error from all below: a tensor has another dtype.
using NamedParameters = std::vector<std::pair<std::string, torch::Tensor>>;

// A module's parameters, in the order of its named_parameters().
NamedParameters ParametersOf(const torch::nn::Module& module);

// Scales the gradients so that their total norm is at most max_norm, and returns the norm before
// that. INVALID_ARGUMENT, naming the parameter: a gradient is not finite; nothing is changed.
absl::StatusOr<double> ClipGradNorm(const NamedParameters& parameters, double max_norm);

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

// Keeps fp32 masters and moments; a step makes each parameter bf16(master).
class AdamW {
 public:
  // INVALID_ARGUMENT: an option is out of its range.
  static absl::StatusOr<AdamW> Create(NamedParameters parameters, const AdamWOptions& options);

  // One step; drops the gradients. INVALID_ARGUMENT, naming the parameter: a gradient is not
  // finite; then nothing is updated and the gradients stay.
  absl::Status Step();

  void set_lr(double lr) { options_.lr = lr; }

  // The state of one parameter: fp32, in its shape, on its device.
  struct State {
    int64_t steps = 0;
    torch::Tensor master;
    torch::Tensor m;
    torch::Tensor v;
  };
  // In the order of the parameters. To resume a run, assign an earlier run's state.
  std::vector<State>& state() { return state_; }

 private:
  AdamW(NamedParameters parameters, const AdamWOptions& options);

  NamedParameters parameters_;
  AdamWOptions options_;
  std::vector<State> state_;
};

}  // namespace isobit::front

#endif  // ISOBIT_TRAINER_BRIDGE_FRONT_OPTIMIZER_H_
