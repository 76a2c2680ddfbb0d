#include "trainer_bridge/torch/backend.h"

#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/training_ops.h"

namespace isobit::bridge {
namespace {

// The CPU kernels of this process, with as many threads as PyTorch has. One op at a time: each uses
// all threads.
class CpuBackend {
 public:
  static CpuBackend& Get() {
    static auto& backend = *new CpuBackend;  // never destroyed: an op may run while main ends
    return backend;
  }
  absl::Status With(absl::FunctionRef<absl::Status(TrainingOps&)> run) {
    const std::lock_guard lock(mutex_);
    Prepare(std::max(1, static_cast<int>(torch::stable::get_num_threads())));
    return run(*ops_);
  }

 private:
  void Prepare(int num_threads) {
    if (ops_ != nullptr && num_threads == num_threads_ && getpid() == process_) return;
    // A fork takes the object along, but not its threads, which its destructor would wait for.
    if (getpid() != process_) static_cast<void>(ops_.release());
    CpuOptions options;
    options.num_threads = num_threads;
    ops_ = MakeCpuTrainingOps(options);
    num_threads_ = num_threads;
    process_ = getpid();
  }

  std::mutex mutex_;
  std::unique_ptr<TrainingOps> ops_;
  int num_threads_ = 0;
  pid_t process_ = 0;
};

}  // namespace

Backend::Backend(const char* op, const torch::stable::Tensor& tensor) : tensor_(tensor) {
  if (tensor.is_cpu()) return;
  throw std::runtime_error(absl::StrCat(
      "isobit::", op, ": expected tensors on cpu, got another device: this build has no kernels",
      " for it (CUDA kernels come with -DISOBIT_CUDA=ON)"));
}

absl::Status Backend::With(absl::FunctionRef<absl::Status(TrainingOps&)> run) const {
  return CpuBackend::Get().With(run);
}

}  // namespace isobit::bridge
