// The transfer of LogProbsArgs: requests from host memory to the GPU's kernels, and results back.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_TRANSFER_H_
#define ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_TRANSFER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/log_probs/log_probs.h"
#include "kernels/ops/log_probs.h"

namespace isobit::cuda {

// Whether a row has filters or a top list.
bool IsRanked(const LogProbRequest& request);

// Owns the buffers of the transfer and keeps them between calls. One caller at a time.
class LogProbTransfer {
 public:
  LogProbTransfer() = default;
  ~LogProbTransfer();
  LogProbTransfer(const LogProbTransfer&) = delete;
  LogProbTransfer& operator=(const LogProbTransfer&) = delete;

  // Allocates what `num_rows` rows without lists need, so that later calls for such rows do not
  // grow the buffers: freeing waits for the device. RESOURCE_EXHAUSTED: there is no memory.
  absl::Status Reserve(int64_t num_rows, const Stream& stream);
  size_t device_bytes() const { return device_.bytes + workspace_.bytes; }

  // The op LogProbs on the current device: requests, their lists and results are in host memory,
  // logits in GPU memory. Waits for the stream. INVALID_ARGUMENT: the vocabulary exceeds
  // kMaxDeviceVocab, or a list exceeds kMaxTopLogProbs. RESOURCE_EXHAUSTED: there is no memory.
  absl::Status Run(const LogProbsArgs& args, const Stream& stream);

  // Run without the wait: once the stream has reached this point, Read sets the results. Errors:
  // those of Run. The requests and all that they point to must stay until then. ids: also gets the
  // drawn ids, in GPU memory [num_rows]; may be null.
  absl::Status Launch(const LogProbsArgs& args, int32_t* ids, const Stream& stream);
  void Read(const LogProbsArgs& args) const { Read(args, 0, args.num_rows); }

  // The steps of Launch, for rows whose ranges are on several GPUs: Send copies the kernels' input,
  // the caller launches the kernels, Fetch copies their output. Read: only rows [begin, end).
  absl::StatusOr<DeviceLogProbs> Send(const LogProbsArgs& args, int32_t* ids, const Stream& stream);
  absl::Status Fetch(const LogProbsArgs& args, const Stream& stream);
  void Read(const LogProbsArgs& args, int64_t begin, int64_t end) const;

 private:
  struct Block {
    std::byte* data = nullptr;
    size_t bytes = 0;
  };

  absl::Status Grow(size_t bytes, size_t workspace_bytes, const Stream& stream);

  Block host_;       // pinned: input for the GPU, later its output
  Block device_;     // the same on the GPU
  Block workspace_;  // of the kernels
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_TRANSFER_H_
