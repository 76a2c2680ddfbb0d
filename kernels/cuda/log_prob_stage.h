// LogProbArgs, whose rows lie in host memory, brought to the GPU kernels and back.
#ifndef ISOBIT_KERNELS_CUDA_LOG_PROB_STAGE_H_
#define ISOBIT_KERNELS_CUDA_LOG_PROB_STAGE_H_

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/cuda/launch.h"
#include "kernels/ops.h"

namespace isobit::cuda {

// The memory between host rows and device rows, kept from call to call. One caller at a time.
class LogProbStage {
 public:
  LogProbStage() = default;
  ~LogProbStage();
  LogProbStage(const LogProbStage&) = delete;
  LogProbStage& operator=(const LogProbStage&) = delete;

  // Ops::LogProbs on the current device: args.rows, their lists and their outputs are host memory,
  // logits GPU memory. Waits for the stream. INVALID_ARGUMENT: a vocabulary beyond kMaxDeviceVocab
  // or a list beyond kMaxTopLogProbs; RESOURCE_EXHAUSTED: no memory.
  absl::Status Run(const LogProbArgs& args, const Stream& stream);

 private:
  // Makes both blocks at least this large; `device_` is then zeroed.
  absl::Status Reserve(size_t host_bytes, size_t device_bytes, const Stream& stream);

  std::byte* host_ = nullptr;  // pinned
  std::byte* device_ = nullptr;
  size_t host_bytes_ = 0;
  size_t device_bytes_ = 0;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_LOG_PROB_STAGE_H_
