// ForwardProbe on a GPU gives the CPU's digests, row digests and values, at every tensor-parallel
// size, and sees a fault where it is. All ranks share one GPU.
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/model/forward_probe_fixture.h"

namespace isobit {
namespace {

class ForwardProbeCudaTest : public ForwardProbeFixture {
 protected:
  void SetUp() override {
    if (const auto ops = CudaBackend::Create({}); !ops.ok()) {
      GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << ops.status().message();
    }
  }

  const MakeOps on_gpu_ = [] { return CudaBackend::Create({}).value(); };
};

TEST_F(ForwardProbeCudaTest, GivesTheCpusDigests) {
  const ProbeReport cpu = Probe(1);
  EXPECT_EQ(cpu.digests.size(), 3 + 12 * static_cast<size_t>(config_.num_layers));
  for (const int size : {1, 2, 4, 8}) {
    EXPECT_EQ(FirstDifference(cpu, ProbeOf(on_gpu_, size)).layer, -1) << "TP " << size;
  }
  const ProbeReport vanilla =
      ProbeOf([] { return CudaBackend::Create({.mode = NumericsMode::kVanilla}).value(); }, 2);
  EXPECT_NE(FirstDifference(cpu, vanilla).layer, -1) << "control";
}

TEST_F(ForwardProbeCudaTest, GivesTheCpusRowsAndValues) {
  for (const ProbeReport::Digest& digest : Probe(1).digests) {
    const ProbeWanted wanted = {.site = digest.site,
                                .row = static_cast<int64_t>(kTokens.size()) - 1};
    const ProbeReport cpu = Probe(1, wanted);
    ASSERT_EQ(cpu.row_digests.size(), kTokens.size());
    ASSERT_FALSE(cpu.values.empty());
    for (const int size : {1, 4}) {
      const ProbeReport gpu = ProbeOf(on_gpu_, size, wanted);
      EXPECT_EQ(gpu.row_digests, cpu.row_digests)
          << "layer " << digest.site.layer << ", op " << static_cast<int>(digest.site.op);
      EXPECT_EQ(gpu.values, cpu.values)
          << "layer " << digest.site.layer << ", op " << static_cast<int>(digest.site.op);
    }
  }
}

// A control: a scale that is wrong on one of the ranks is seen where it is. The other faults of the
// fixture change what the CUDA backend reads from GPU memory, not from its arguments.
TEST_F(ForwardProbeCudaTest, AFaultIsSeenWhereItIs) {
  const ProbeReport right = Probe(1);
  const std::vector<std::pair<Fault, ProbeSite>> cases = {{Fault::kScale, {1, ProbeOp::kAttention}},
                                                          {Fault::kNorm, {1, ProbeOp::kInputNorm}}};
  for (const auto& [fault, site] : cases) {
    for (const int size : {1, 2}) {
      EXPECT_EQ(FirstDifference(right, ProbeOf(on_gpu_, size, {}, fault)), site) << size;
    }
  }
}

}  // namespace
}  // namespace isobit
