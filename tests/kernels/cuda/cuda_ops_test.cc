// The CUDA backend as a whole: its errors where it cannot run, its memory, and that every op can be
// called through the interface. The ops' bits have tests of their own.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/step_kernels.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit {
namespace {

// Runs everywhere: with a GPU it asks for a device that does not exist, without one for the first.
TEST(CudaOpsTest, SaysThatADeviceCannotBeUsed) {
  const int device = cuda::GetDeviceInfo(0).ok() ? 99 : 0;
  const absl::Status status = CudaBackend::Create({.device = device}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status.ToString();
  EXPECT_FALSE(status.message().empty());
}

TEST(CudaOpsTest, CopiesInOrderAndSharesACopy) {
  ISOBIT_SKIP_WITHOUT_GPU();
  const auto ops = CudaBackend::Create({}).value();
  const std::vector<int32_t> sent = {3, 1, 4, 1, 5, 9};
  const size_t bytes = sent.size() * sizeof(int32_t);
  const Memory a = ops->device().Allocate(bytes).value();
  const Memory b = ops->device().Allocate(bytes).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.get()) % 256, 0u);
  std::vector<int32_t> received(sent.size());
  ASSERT_TRUE(ops->device().Copy(a.get(), sent.data(), bytes).ok());
  ASSERT_TRUE(ops->device().Copy(b.get(), a.get(), bytes).ok());
  ASSERT_TRUE(ops->device().Copy(received.data(), b.get(), bytes).ok());
  ASSERT_TRUE(ops->device().Synchronize().ok());
  EXPECT_EQ(received, sent);

  auto host = std::make_shared<std::vector<int32_t>>(sent);
  const auto shared =
      ops->device().Share({host, reinterpret_cast<const std::byte*>(host->data())}, bytes).value();
  std::fill(host->begin(), host->end(), 0);
  ASSERT_TRUE(ops->device().Copy(received.data(), shared.get(), bytes).ok());
  ASSERT_TRUE(ops->device().Synchronize().ok());
  EXPECT_EQ(received, sent);
}

TEST(CudaOpsTest, UploadsBesideTheOps) {
  ISOBIT_SKIP_WITHOUT_GPU();
  const auto ops = CudaBackend::Create({}).value();
  const std::vector<int32_t> sent(1 << 20, 7);
  const size_t bytes = sent.size() * sizeof(int32_t);
  size_t before = 0, after = 0, total = 0;
  ASSERT_TRUE(ops->device().AllocateBeside(bytes).ok());  // the device makes its pool
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  for (int i = 0; i < 3; ++i) {
    const Memory memory = ops->device().AllocateBeside(bytes).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % 256, 0u);
    ASSERT_TRUE(ops->device().Upload(memory.get(), sent.data(), bytes).ok());
    std::vector<int32_t> received(sent.size());
    ASSERT_TRUE(ops->device().Copy(received.data(), memory.get(), bytes).ok());
    ASSERT_TRUE(ops->device().Synchronize().ok());
    EXPECT_EQ(received, sent);
  }
  if (testing_support::SharesGpu()) return;
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_EQ(after, before) << "what was freed is not the device's again";
  // It leaves some memory free where Allocate would not.
  EXPECT_EQ(ops->device().AllocateBeside(before - (size_t{512} << 20)).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// The addresses stay, also in a captured graph, and so do the bytes that are the GPU's.
TEST(CudaMemoryTest, ReleasedBytesAreTheGpus) {
  ISOBIT_SKIP_WITHOUT_GPU();
  const auto ops = CudaBackend::Create({}).value();
  auto& device = static_cast<CudaDevice&>(ops->device());
  constexpr size_t kBytes = (size_t{64} << 20) + 4096;
  const std::unique_ptr<ReleasableMemory> memory = device.AllocateReleasable(kBytes).value();
  std::byte* const address = memory->get();
  const size_t taken = memory->bytes();
  EXPECT_GE(taken, kBytes);
  EXPECT_EQ(device.allocated_bytes(), taken);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t fill = nullptr;
  const cudaStream_t stream = device.stream().handle;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(address, 7, kBytes, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&fill, graph, 0), cudaSuccess);
  size_t with = 0, without = 0, total = 0;
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(cudaGraphLaunch(fill, stream), cudaSuccess);
    std::vector<std::byte> received(kBytes);
    ASSERT_TRUE(device.Copy(received.data(), address, kBytes).ok());
    ASSERT_TRUE(device.Synchronize().ok());
    EXPECT_EQ(std::count(received.begin(), received.end(), std::byte{7}), int64_t{kBytes});
    ASSERT_EQ(cudaMemGetInfo(&with, &total), cudaSuccess);
    ASSERT_TRUE(memory->Release().ok());
    EXPECT_EQ(memory->bytes(), 0u);
    EXPECT_EQ(device.allocated_bytes(), 0u);
    ASSERT_EQ(cudaMemGetInfo(&without, &total), cudaSuccess);
    EXPECT_TRUE(testing_support::SharesGpu() || without - with == taken) << without - with;
    ASSERT_TRUE(memory->Restore().ok());
    EXPECT_EQ(memory->get(), address);
  }
  cudaGraphExecDestroy(fill);
  cudaGraphDestroy(graph);
  const auto huge = device.AllocateReleasable(size_t{1} << 50);
  EXPECT_EQ(huge.status().code(), absl::StatusCode::kResourceExhausted) << huge.status();
  EXPECT_EQ(device.allocated_bytes(), taken);
}

// Pages of whole 16-byte units and others; more copies than one launch makes, some of which read or
// replace what an earlier one has written.
TEST(CudaOpsTest, CopiesPagesInOrder) {
  ISOBIT_SKIP_WITHOUT_GPU();
  const auto ops = CudaBackend::Create({}).value();
  constexpr int32_t kPages = 400;
  constexpr int64_t kPlanes = 6;
  std::mt19937 random(7);
  for (const int64_t elements : {4096, 72, 30}) {
    SCOPED_TRACE(elements);
    std::vector<Bf16> pages(static_cast<size_t>(kPlanes * kPages * elements));
    for (Bf16& element : pages) element = static_cast<Bf16>(random());
    const size_t bytes = pages.size() * sizeof(Bf16);
    const Memory memory = ops->device().Allocate(bytes).value();
    ASSERT_TRUE(ops->device().Copy(memory.get(), pages.data(), bytes).ok());
    std::vector<PageCopy> copies;
    for (int i = 0; i < 700; ++i) {
      copies.push_back({static_cast<int32_t>(random() % kPages),
                        static_cast<int32_t>(random() % (i < 300 ? kPages : 20))});
      if (copies.back().from == copies.back().to) copies.pop_back();
    }
    ASSERT_TRUE(ops->Run(CopyPagesArgs{.planes = reinterpret_cast<Bf16*>(memory.get()),
                                       .num_planes = kPlanes,
                                       .plane_stride = kPages * elements,
                                       .page_elements = elements,
                                       .copies = copies})
                    .ok());
    for (const PageCopy& copy : copies) {
      for (int64_t plane = 0; plane < kPlanes; ++plane) {
        const auto first = pages.begin() + plane * kPages * elements;
        std::copy_n(first + copy.from * elements, elements, first + copy.to * elements);
      }
    }
    std::vector<Bf16> copied(pages.size());
    ASSERT_TRUE(ops->device().Copy(copied.data(), memory.get(), bytes).ok());
    ASSERT_TRUE(ops->device().Synchronize().ok());
    EXPECT_TRUE(copied == pages);
  }
}

TEST(CudaOpsTest, PicksRowsInAnyNumber) {
  ISOBIT_SKIP_WITHOUT_GPU();
  const auto ops = CudaBackend::Create({}).value();
  std::mt19937 random(8);
  for (const int64_t width : {4096, 36, 7}) {
    constexpr int64_t kRows = 300;
    std::vector<Bf16> hidden(static_cast<size_t>(kRows * width));
    for (Bf16& element : hidden) element = static_cast<Bf16>(random());
    const size_t bytes = hidden.size() * sizeof(Bf16);
    const Memory from = ops->device().Allocate(bytes).value();
    ASSERT_TRUE(ops->device().Copy(from.get(), hidden.data(), bytes).ok());
    for (const size_t count : {0u, 1u, 512u, 513u, 1100u}) {
      SCOPED_TRACE(count);
      std::vector<int64_t> rows(count);
      for (int64_t& row : rows) row = static_cast<int64_t>(random() % kRows);
      std::vector<Bf16> expected;
      for (const int64_t row : rows) {
        const auto first = hidden.begin() + row * width;
        expected.insert(expected.end(), first, first + width);
      }
      std::vector<Bf16> picked(expected.size());
      const Memory to = ops->device().Allocate((expected.size() + 1) * sizeof(Bf16)).value();
      ASSERT_TRUE(cuda::LaunchPickRows(reinterpret_cast<const Bf16*>(from.get()), rows, width,
                                       reinterpret_cast<Bf16*>(to.get()), ops->device().stream())
                      .ok());
      if (!picked.empty()) {
        ASSERT_TRUE(ops->device().Copy(picked.data(), to.get(), picked.size() * sizeof(Bf16)).ok());
      }
      ASSERT_TRUE(ops->device().Synchronize().ok());
      EXPECT_TRUE(picked == expected);
    }
  }
}

TEST(CudaOpsTest, SaysThatMemoryIsExhausted) {
  ISOBIT_SKIP_WITHOUT_GPU();
  const auto ops = CudaBackend::Create({}).value();
  EXPECT_EQ(ops->device().Allocate(size_t{1} << 50).status().code(),
            absl::StatusCode::kResourceExhausted);
  // The refusal leaves the backend usable.
  EXPECT_TRUE(ops->device().Allocate(1024).ok());
  EXPECT_TRUE(ops->device().Synchronize().ok());
}

}  // namespace
}  // namespace isobit
