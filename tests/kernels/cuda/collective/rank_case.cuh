// A group of ranks for the tests of their sums.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_COLLECTIVE_RANK_CASE_CUH_
#define ISOBIT_TESTS_KERNELS_CUDA_COLLECTIVE_RANK_CASE_CUH_

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "tests/kernels/cuda/collective/all_reduce_case.cuh"

namespace isobit::cuda {

// How long ranks wait for each other unless a test says otherwise.
inline const absl::Duration kRankTimeout = absl::Seconds(5 * testing_support::Patience());

// The devices of a group, and a stream for each rank.
class RankStreams {
 public:
  explicit RankStreams(std::vector<int> devices) : devices_(std::move(devices)) {
    EXPECT_TRUE(kEnvironment);
    for (const int device : devices_) {
      ISOBIT_CHECK_CUDA(cudaSetDevice(device));
      streams_.push_back({.card = &kH200});
      ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&streams_.back().handle, cudaStreamNonBlocking));
    }
  }
  RankStreams(const RankStreams&) = delete;
  RankStreams& operator=(const RankStreams&) = delete;
  ~RankStreams() {
    Each([this](int r) { cudaStreamDestroy(streams_[r].handle); });
    cudaSetDevice(0);
  }

  int size() const { return static_cast<int>(devices_.size()); }
  const std::vector<int>& devices() const { return devices_; }
  Stream& stream(int r) { return streams_[r]; }

  // Calls it for each rank, on the rank's device.
  void Each(const std::function<void(int)>& work) const {
    for (int r = 0; r < size(); ++r) {
      ISOBIT_CHECK_CUDA(cudaSetDevice(devices_[r]));
      work(r);
    }
  }
  // The same, each call on a thread of its own.
  void AtOnce(const std::function<void(int)>& work) const {
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        ISOBIT_CHECK_CUDA(cudaSetDevice(devices_[r]));
        work(r);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  void Synchronize() const {
    Each([this](int r) { ISOBIT_CHECK_CUDA(cudaStreamSynchronize(streams_[r].handle)); });
  }

 private:
  std::vector<int> devices_;
  std::vector<Stream> streams_;
};

// Expects that every rank has the expected digest of every step in `digests`. Returns how many it
// compared.
template <typename Buffers>
int64_t ExpectDigests(const RankStreams& ranks,
                      const std::vector<std::unique_ptr<Buffers>>& buffers,
                      const std::vector<unsigned long long>& expected) {
  int64_t compared = 0;
  ranks.Each([&](int r) {
    const std::vector<unsigned long long> digests = buffers[r]->digests.CopyOut();
    ASSERT_EQ(digests.size(), expected.size());
    for (size_t step = 0; step < expected.size(); ++step) {
      EXPECT_EQ(digests[step], expected[step]) << "rank " << r << ", step " << step;
      ++compared;
    }
  });
  return compared;
}

// A group with the all-reduce of each rank.
class Ranks : public RankStreams {
 public:
  Ranks(std::vector<int> devices, const AllReduceOptions& options)
      : RankStreams(std::move(devices)) {
    auto group = PeerGroup::Create(this->devices());
    EXPECT_TRUE(group.ok()) << group.status();
    auto ends = PeerAllReduce::Create(*group, options);
    EXPECT_TRUE(ends.ok()) << ends.status();
    ends_ = *std::move(ends);
  }

  PeerAllReduce& end(int r) { return *ends_[r]; }
  void ExpectOk() const {
    for (const auto& end : ends_) EXPECT_TRUE(end->Check().ok()) << end->Check();
  }

 private:
  std::vector<std::unique_ptr<PeerAllReduce>> ends_;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_TESTS_KERNELS_CUDA_COLLECTIVE_RANK_CASE_CUH_
