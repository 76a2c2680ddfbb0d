// Shared by the GPU subcommands of isobit-bench: device memory with random data, races between
// contenders in CUDA graphs, and the machine's ceilings.
#ifndef ISOBIT_BENCH_KERNELS_HARNESS_H_
#define ISOBIT_BENCH_KERNELS_HARNESS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/common/vanilla/cublas_linear.h"
#include "kernels/cuda/sm90/device/card.h"
#include "kernels/cuda/sm90/device/device_info.h"

namespace isobit::bench {

struct FreeDeviceMemory {
  void operator()(std::byte* memory) const { cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<std::byte, FreeDeviceMemory>;

// Zeroed. RESOURCE_EXHAUSTED: not that much memory.
absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes);

// Bytes of bf16 values (normal, times `scale`) on the device.
absl::StatusOr<DeviceMemory> RandomBf16(size_t bytes, uint32_t seed, float scale);
// Likewise of fp32 values.
absl::StatusOr<DeviceMemory> RandomFp32(size_t bytes, uint32_t seed, float scale);

// One contender of a race. Call number i of `call` puts its work on the stream; it may choose its
// buffers by i.
struct Contender {
  bool dependent = true;  // programmatic dependent launch
  std::function<absl::Status(int64_t i, const cuda::Stream& stream)> call;
};

// How a race is run: each round replays every contender in turn for about slot_us.
struct RacePlan {
  int rounds = 0;
  double slot_us = 0;
};

// The microseconds of one call of each contender in each round, [contender][round].
using RaceTimes = std::vector<std::vector<double>>;

// Median of a contender's rounds, in microseconds.
double Median(std::vector<double> values);
// Median over rounds of a's time divided by b's.
double MedianRatio(const std::vector<double>& a, const std::vector<double>& b);

class Harness {
 public:
  // FAILED_PRECONDITION: no device that the kernels run on.
  static absl::StatusOr<std::unique_ptr<Harness>> Create();
  Harness(const Harness&) = delete;
  Harness& operator=(const Harness&) = delete;
  ~Harness();

  // Captures calls 0 .. calls-1 of each contender into a graph and replays the graphs, contenders
  // interleaved in rounds.
  absl::StatusOr<RaceTimes> Race(absl::Span<const Contender> contenders, int64_t calls,
                                 const RacePlan& plan);

  const cuda::DeviceInfo& device() const { return device_; }
  cuda::CublasLinear& cublas() { return *cublas_; }
  const cuda::Card& card() const { return card_; }
  cudaStream_t stream() const { return stream_; }

  // Bytes per second that a device-to-device copy of 2 GiB moves: read and written bytes both
  // count.
  double copy_rate() const { return copy_rate_; }
  // bf16 operations per second of cuBLAS in an 8192 x 8192 x 8192 product of normal data.
  double tensor_rate() const { return tensor_rate_; }
  // The least microseconds in which these bytes can be moved and these operations done.
  double Roofline(double bytes, double operations) const;
  // The machine, its software and its ceilings, in a few lines.
  std::string Describe() const;

 private:
  Harness() = default;
  absl::Status MeasureCeilings();
  // Time from the last record of begin_ to the end of all work so far; waits for that end.
  absl::StatusOr<double> MicrosecondsSinceBegin();

  cuda::DeviceInfo device_;
  cuda::Card card_ = {};
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::unique_ptr<cuda::CublasLinear> cublas_;
  double copy_rate_ = 0;
  double tensor_rate_ = 0;
};

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_HARNESS_H_
