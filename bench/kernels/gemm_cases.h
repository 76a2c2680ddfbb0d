// The cases of isobit-bench gemm: the linear layers of whole models, and calls of them.
#ifndef ISOBIT_BENCH_KERNELS_GEMM_CASES_H_
#define ISOBIT_BENCH_KERNELS_GEMM_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/kernels/harness.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/linear_shape.h"

namespace isobit::bench {

enum class Output { kBf16, kFp32, kSwiGlu };

struct Layer {
  std::string model;
  int64_t tp = 1;
  std::string name;
  LinearShape shape;
  Output output = Output::kBf16;
};

// The layers and the M that --models, --tp, --layers and --m ask for; with --quick, some of them.
// Checks --l2 too. INVALID_ARGUMENT names the flag.
absl::StatusOr<std::vector<Layer>> LayersOfFlags();
absl::StatusOr<std::vector<int64_t>> RowsOfFlags();

// Whether, by --l2, each call finds its weights in memory rather than in the L2.
bool ColdWeights();

// What an ordinary engine asks of cuBLAS: bf16, and fp32 for the logits.
Output BaselineOutput(const Layer& layer);

// Of one call.
double BytesOf(const Layer& layer, int64_t m);
double OperationsOf(const Layer& layer, int64_t m);

// Buffers large enough for every case.
struct Buffers {
  size_t weight_bytes = 0;
  DeviceMemory weights;
  DeviceMemory x;
  DeviceMemory y;
  DeviceMemory gate_up;  // cuBLAS's, before the SwiGLU kernel
};
// RESOURCE_EXHAUSTED: they do not fit.
absl::StatusOr<Buffers> AllocateBuffers(const std::vector<Layer>& layers,
                                        const std::vector<int64_t>& rows);

// The calls of a graph. With cold weights they use several copies in turn, of more than three times
// the L2.
struct Calls {
  const Layer& layer;
  const Buffers& buffers;
  int64_t m = 0;
  int64_t count = 0;
  int64_t copies = 0;
  size_t stride = 0;  // bytes from copy to copy

  Calls(const Harness& harness, const Buffers& buffers, const Layer& layer, int64_t m);
  LinearArgs Args(int64_t call, Output output) const;
  Contender Cublas(Harness& harness, Output output) const;
};

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_GEMM_CASES_H_
