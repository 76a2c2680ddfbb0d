// What the tests of CUDA ops share: GPU memory with guard zones and poison, and the loud skip where
// there is no usable GPU.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_DEVICE_CASE_H_
#define ISOBIT_TESTS_KERNELS_CUDA_DEVICE_CASE_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/device/card.h"
#include "kernels/cuda/sm90/device/device_info.h"

namespace isobit::testing_support {

// Ends the program if a CUDA call of the test itself fails: later results would mean nothing.
inline void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}
#define ISOBIT_CHECK_CUDA(call) ::isobit::testing_support::CheckCuda((call), #call)

// A stream on which ops choose the H200's schedules, whatever the GPU is.
inline cuda::Stream OnH200(cudaStream_t stream = nullptr, bool dependent = true) {
  return {stream, dependent, nullptr, &cuda::kH200};
}

// In a test's or fixture's body: skips the test, and says why, where the kernels cannot run.
#define ISOBIT_SKIP_WITHOUT_GPU()                                              \
  do {                                                                         \
    if (const auto device = ::isobit::cuda::GetDeviceInfo(0); !device.ok()) {  \
      GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << device.status().message(); \
    }                                                                          \
  } while (false)

// The fixture of tests that need nothing but a GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override { ISOBIT_SKIP_WITHOUT_GPU(); }
};

// `count` cases, or the share of them that the environment variable ISOBIT_TEST_SCALE (such as
// 0.02) asks for, at least one: a sanitizer slows a kernel a hundredfold (tests/run_sanitizers.sh).
inline int Scaled(int count) {
  const char* const scale = std::getenv("ISOBIT_TEST_SCALE");
  return scale == nullptr ? count : std::max(1, static_cast<int>(count * std::atof(scale)));
}

// Whether ISOBIT_TEST_SHARED_GPU says that other processes are on the GPU: they take and give
// memory.
inline bool SharesGpu() { return std::getenv("ISOBIT_TEST_SHARED_GPU") != nullptr; }
// The factor for time limits: on a shared GPU a kernel waits until others have had their turn.
inline int Patience() { return SharesGpu() ? 100 : 1; }

// n elements of GPU memory between two guard zones; everything is poison (all bits set: a NaN in
// bf16 and in fp32, -1 as an index) until it is written. Bytes `offset` past a 256-byte boundary.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t n, size_t offset = 0)
      : bytes_(static_cast<size_t>(n) * sizeof(T)), offset_(offset) {
    ISOBIT_CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory_), TotalBytes()));
    Poison();
  }
  explicit DeviceBuffer(const std::vector<T>& values, size_t offset = 0)
      : DeviceBuffer(static_cast<int64_t>(values.size()), offset) {
    CopyIn(values);
  }
  ~DeviceBuffer() { cudaFree(memory_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() { return reinterpret_cast<T*>(memory_ + kGuard + offset_); }
  int64_t size() const { return static_cast<int64_t>(bytes_ / sizeof(T)); }

  // Both wait for the device before and after: a memset, and a copy from pageable memory, may
  // return before it has ended, and no stream of a test waits for it.
  void Poison() {
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
    ISOBIT_CHECK_CUDA(cudaMemset(memory_, kPoison, TotalBytes()));
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
  }
  void CopyIn(std::span<const T> values) {
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
    ISOBIT_CHECK_CUDA(cudaMemcpy(data(), values.data(), values.size_bytes(), cudaMemcpyDefault));
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
  }
  // The contents, once the device is idle.
  std::vector<T> CopyOut() {
    std::vector<T> values(bytes_ / sizeof(T));
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
    ISOBIT_CHECK_CUDA(cudaMemcpy(values.data(), data(), bytes_, cudaMemcpyDefault));
    return values;
  }
  bool GuardsIntact() {
    std::vector<unsigned char> all(TotalBytes());
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
    ISOBIT_CHECK_CUDA(cudaMemcpy(all.data(), memory_, all.size(), cudaMemcpyDefault));
    const auto intact = [](unsigned char byte) { return byte == kPoison; };
    const auto begin = all.begin() + static_cast<ptrdiff_t>(kGuard + offset_);
    return std::all_of(all.begin(), begin, intact) &&
           std::all_of(begin + static_cast<ptrdiff_t>(bytes_), all.end(), intact);
  }

 private:
  static constexpr size_t kGuard = 1024;
  static constexpr unsigned char kPoison = 0xff;
  size_t TotalBytes() const { return bytes_ + offset_ + 2 * kGuard; }

  size_t bytes_;
  size_t offset_;
  unsigned char* memory_ = nullptr;
};

// Scratch of an op: the bytes that it asks for, with guards behind them.
class Workspace {
 public:
  cuda::Stream On(cuda::Stream stream) const {
    stream.scratch = &scratch_;
    return stream;
  }
  bool GuardsIntact() const { return bytes_ == nullptr || bytes_->GuardsIntact(); }

 private:
  std::unique_ptr<DeviceBuffer<unsigned char>> bytes_;
  const cuda::Scratch scratch_ = [this](size_t bytes) -> absl::StatusOr<std::byte*> {
    bytes_ = std::make_unique<DeviceBuffer<unsigned char>>(static_cast<int64_t>(bytes));
    return reinterpret_cast<std::byte*>(bytes_->data());
  };
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_CUDA_DEVICE_CASE_H_
