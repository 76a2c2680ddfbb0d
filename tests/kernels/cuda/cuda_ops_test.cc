// The CUDA backend as a whole: its errors where it cannot run, its memory, and that every op can be
// called through the interface. The ops' bits have tests of their own.
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device/device_info.h"
#include "kernels/cuda/make_cuda_ops.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit {
namespace {

// Runs everywhere: with a GPU it asks for a device that does not exist, without one for the first.
TEST(CudaOpsTest, SaysThatADeviceCannotBeUsed) {
  const int device = cuda::GetDeviceInfo(0).ok() ? 99 : 0;
  const absl::Status status = MakeCudaOps({.device = device}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status.ToString();
  EXPECT_FALSE(status.message().empty());
}

TEST(CudaOpsTest, CopiesInOrderAndSharesACopy) {
  ISOBIT_SKIP_WITHOUT_GPU();
  const auto ops = MakeCudaOps({}).value();
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
  const auto ops = MakeCudaOps({}).value();
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

TEST(CudaOpsTest, SaysThatMemoryIsExhausted) {
  ISOBIT_SKIP_WITHOUT_GPU();
  const auto ops = MakeCudaOps({}).value();
  EXPECT_EQ(ops->device().Allocate(size_t{1} << 50).status().code(),
            absl::StatusCode::kResourceExhausted);
  // The refusal leaves the backend usable.
  EXPECT_TRUE(ops->device().Allocate(1024).ok());
  EXPECT_TRUE(ops->device().Synchronize().ok());
}

}  // namespace
}  // namespace isobit
