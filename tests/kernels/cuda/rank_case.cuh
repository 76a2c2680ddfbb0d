// A group of ranks as the tests of the all-reduce use it.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_RANK_CASE_CUH_
#define ISOBIT_TESTS_KERNELS_CUDA_RANK_CASE_CUH_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/all_reduce.h"
#include "tests/kernels/cuda/all_reduce_case.cuh"

namespace isobit::cuda {

// A group with a stream for each rank.
class Ranks {
 public:
  Ranks(std::vector<int> devices, const AllReduceOptions& options) : devices_(std::move(devices)) {
    EXPECT_TRUE(kEnvironment);
    auto group = PeerGroup::Create(devices_);
    EXPECT_TRUE(group.ok()) << group.status();
    auto ends = PeerAllReduce::Create(*group, options);
    EXPECT_TRUE(ends.ok()) << ends.status();
    ends_ = *std::move(ends);
    for (const int device : devices_) {
      ISOBIT_CHECK_CUDA(cudaSetDevice(device));
      streams_.emplace_back();
      ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&streams_.back(), cudaStreamNonBlocking));
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  ~Ranks() {
    Each([this](int r) { cudaStreamDestroy(streams_[r]); });
    cudaSetDevice(0);
  }

  int size() const { return static_cast<int>(devices_.size()); }
  PeerAllReduce& end(int r) { return *ends_[r]; }
  cudaStream_t stream(int r) const { return streams_[r]; }

  // On each rank's device.
  void Each(const std::function<void(int)>& work) const {
    for (int r = 0; r < size(); ++r) {
      ISOBIT_CHECK_CUDA(cudaSetDevice(devices_[r]));
      work(r);
    }
  }
  void Synchronize() const {
    Each([this](int r) { ISOBIT_CHECK_CUDA(cudaStreamSynchronize(streams_[r])); });
  }
  void ExpectOk() const {
    for (const auto& end : ends_) EXPECT_TRUE(end->Check().ok()) << end->Check();
  }

 private:
  std::vector<int> devices_;
  std::vector<std::unique_ptr<PeerAllReduce>> ends_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_TESTS_KERNELS_CUDA_RANK_CASE_CUH_
