// The training ops of the CUDA backend as a trainer calls them, on its stream and with its scratch:
// a whole step has the oracle's bits. The kernels' own tests have the hard shapes.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cuda/device_case.h"
#include "tests/kernels/training_step.h"

namespace isobit {
namespace {

using testing_support::Bits;
using testing_support::Differences;
using testing_support::kStepRows;

const std::vector<int64_t> kPacks = {0, 70, 70, 150, kStepRows};

// Memory that the oracle reaches and the GPU too.
class ManagedMemory {
 public:
  ManagedMemory() = default;
  ~ManagedMemory() {
    for (std::byte* const block : blocks_) cudaFree(block);
  }
  ManagedMemory(const ManagedMemory&) = delete;
  ManagedMemory& operator=(const ManagedMemory&) = delete;

  testing_support::StepMemory ForStep() {
    return {.allocate =
                [this](size_t bytes) {
                  void* block = nullptr;
                  ISOBIT_CHECK_CUDA(cudaMallocManaged(&block, bytes));
                  std::memset(block, 0, bytes);
                  return blocks_.emplace_back(static_cast<std::byte*>(block));
                },
            .wait = [] { ISOBIT_CHECK_CUDA(cudaDeviceSynchronize()); }};
  }

 private:
  std::vector<std::byte*> blocks_;
};

Bits RunStep(OpTable& ops, const std::vector<int64_t>& packs) {
  ManagedMemory memory;
  return testing_support::RunTrainingStep(ops, packs, memory.ForStep());
}

TEST(StreamOpsTest, AStepHasTheOraclesBits) {
  ISOBIT_SKIP_WITHOUT_GPU();
  cudaStream_t stream = nullptr;
  ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<std::unique_ptr<testing_support::DeviceBuffer<unsigned char>>> scratch;
  StreamOps ops(stream, cuda::kH200, [&scratch](size_t bytes) -> absl::StatusOr<std::byte*> {
    scratch.push_back(std::make_unique<testing_support::DeviceBuffer<unsigned char>>(
        static_cast<int64_t>(bytes)));
    return reinterpret_cast<std::byte*>(scratch.back()->data());
  });
  const Bits expected = RunStep(*MakeOracleBackend(), kPacks);
  testing_support::ExpectSameBits(RunStep(ops, kPacks), expected);
  for (const auto& buffer : scratch) EXPECT_TRUE(buffer->GuardsIntact());
  ISOBIT_CHECK_CUDA(cudaStreamDestroy(stream));
  // Control: another order of the sums over rows shows in each of them.
  const Bits other = RunStep(*MakeOracleBackend(), {0, kStepRows});
  for (const char* const name : testing_support::kSumsOverRows) {
    EXPECT_GT(Differences(expected[name], other[name]), 0) << name;
  }
}

TEST(StreamOpsTest, ScratchThatFailsFailsTheOp) {
  StreamOps ops(nullptr, cuda::kH200, [](size_t) -> absl::StatusOr<std::byte*> {
    return absl::ResourceExhaustedError("no scratch");
  });
  ColumnSumsArgs args;
  args.columns = 8;
  args.packs = kPacks;
  EXPECT_EQ(ops.Run(args).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace isobit
