// The floating-point environment of the contract: round to nearest, subnormal numbers kept.
#ifndef ISOBIT_TRAINER_BRIDGE_TORCH_FLOAT_ENVIRONMENT_H_
#define ISOBIT_TRAINER_BRIDGE_TORCH_FLOAT_ENVIRONMENT_H_

#include <cfenv>

namespace isobit::bridge {

// Sets it for the calling thread, and for the threads that this one starts meanwhile (those of the
// CPU kernels), and restores the caller's at the end: PyTorch's process may flush subnormal numbers
// (torch.set_flush_denormal, libraries built for fast arithmetic).
// INVARIANT: no setting of the caller's thread changes a bit
// (tests/torch/float_environment_test.py).
class FloatEnvironment {
 public:
  FloatEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&callers_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t callers_;
};

}  // namespace isobit::bridge

#endif  // ISOBIT_TRAINER_BRIDGE_TORCH_FLOAT_ENVIRONMENT_H_
