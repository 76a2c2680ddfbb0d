#include "trainer_bridge/torch/backend.h"

#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "kernels/cpu/cpu_backend.h"
#include "trainer_bridge/torch/cuda_backend.h"

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
  absl::Status With(absl::FunctionRef<absl::Status(const OpTable&)> run) {
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
    ops_ = MakeCpuBackend(options);
    num_threads_ = num_threads;
    process_ = getpid();
  }

  std::mutex mutex_;
  std::unique_ptr<Backend> ops_;
  int num_threads_ = 0;
  pid_t process_ = 0;
};

}  // namespace

absl::Status WithBackend(const torch::stable::Tensor& tensor,
                         absl::FunctionRef<absl::Status(const OpTable&)> run) {
  if (tensor.is_cpu()) return CpuBackend::Get().With(run);
  if (tensor.is_cuda()) return WithCuda(tensor, run);
  return absl::UnimplementedError("expected tensors on cpu or cuda, got another device");
}

}  // namespace isobit::bridge
