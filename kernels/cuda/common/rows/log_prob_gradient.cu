// The gradient of logits (C14), in one pass over them.
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/sampling.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/ops/log_probs.h"

namespace isobit::cuda {
namespace {

using contract::kMinusInfinity;

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // of eight logits, of a thread
constexpr int kTile = kThreads * kVectors * kColumns;

// contract::LogitGradient's factors, which are the same for a whole row.
struct RowFactors {
  int32_t target;
  float inverse_temperature;
  float max;
  float inverse_sum;
  float mean;
  float dlogprob;
  float dentropy;
  float last_z;
  int32_t last_id;
  bool finite;
  bool checks;  // a token may be filtered out

  __device__ RowFactors(const LogProbGradientArgs& a, int64_t row) {
    const LogProbRow state = a.state[row];
    const float* temperatures = a.sampling.temperature;
    target = a.targets[row];
    inverse_temperature =
        contract::InverseTemperature(temperatures != nullptr ? temperatures[row] : 1.0f);
    max = state.sum.max;
    inverse_sum = contract::Div(1.0f, state.sum.sum);
    mean = contract::Div(state.sum.weighted_distance, state.sum.sum);
    dlogprob = a.dlogprobs[row];
    dentropy = a.dentropies != nullptr ? a.dentropies[row] : 0.0f;
    finite = state.finite != 0;
    // Without filters, only a z of -inf is left out: a finite logit can become one if the
    // temperature is below 1.
    const bool filters = state.last_id >= 0;
    checks = filters || inverse_temperature > 1.0f;
    last_z = filters ? state.last_z : kMinusInfinity;
    last_id = filters ? state.last_id : -1;
  }

  // contract::LogitGradient before its rounding; +0 of a token that was filtered out. kChecks: as
  // `checks`.
  template <bool kChecks>
  __device__ __forceinline__ float Gradient(float logit, int32_t id) const {
    const float z = contract::Mul(logit, inverse_temperature);
    const float y = contract::Sub(z, max);
    const float p = contract::Mul(ExpOfDistance(contract::Mul(y, contract::kLog2E)), inverse_sum);
    float d = contract::Mul(p, contract::Fma(dentropy, contract::Sub(mean, y), -dlogprob));
    if (id == target) d = contract::Add(d, dlogprob);
    d = contract::Mul(d, inverse_temperature);
    if (kChecks && !(z > last_z || (z == last_z && id <= last_id))) d = 0.0f;
    return d;
  }

 private:
  // contract::Exp2 for x <= 0.5. The shift moves round(x) to the exponent, which is exact: from
  // -126 on, no result is subnormal.
  static __device__ __forceinline__ float ExpOfDistance(float x) {
    constexpr float kMagic = 0x1.8p23f;
    const float shifted = contract::Add(x, kMagic);
    const float f = contract::Sub(x, contract::Sub(shifted, kMagic));
    const uint32_t bits = contract::BitsOf(contract::Exp2OfFraction(f));
    return x < -126.0f ? 0.0f : contract::FromBits(bits + (contract::BitsOf(shifted) << 23));
  }
};

template <bool kChecks>
__device__ __forceinline__ Columns GradientOfVector(const RowFactors& row,
                                                    const float (&logits)[kColumns], int32_t id) {
  Columns out;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    out.pairs[i] = PackBf16(row.Gradient<kChecks>(logits[2 * i], id + 2 * i),
                            row.Gradient<kChecks>(logits[2 * i + 1], id + 2 * i + 1));
  }
  return out;
}

constexpr uint32_t kNaNPair = 0x7fff7fffu;

// A block has a tile of a row.
__global__ void __launch_bounds__(kThreads)
    LogProbGradientKernel(const LogProbGradientArgs a, unsigned tiles) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const unsigned row = blockIdx.x / tiles;
  const auto first = static_cast<int>((blockIdx.x - row * tiles) * kTile + threadIdx.x * kColumns);
  const float* from = a.logits + row * a.vocab;
  Bf16* to = a.dlogits + row * a.vocab;
  // A thread beyond the row computes its last vector again: without a branch, all loads start at
  // once.
  const auto last = static_cast<int>(a.vocab) - kColumns;
  float logits[kVectors][kColumns];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    LoadFloats(from + min(first + v * kThreads * kColumns, last), logits[v]);
  }
  const RowFactors factors(a, row);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int id = min(first + v * kThreads * kColumns, last);
    Columns out = {{kNaNPair, kNaNPair, kNaNPair, kNaNPair}};
    if (factors.finite) {
      out = factors.checks ? GradientOfVector<true>(factors, logits[v], id)
                           : GradientOfVector<false>(factors, logits[v], id);
    }
    StoreColumns(to + id, out);
  }
}

// Any vocabulary and alignment.
__global__ void __launch_bounds__(kThreads)
    RaggedLogProbGradientKernel(const LogProbGradientArgs a, unsigned tiles) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const unsigned row = blockIdx.x / tiles;
  const auto begin = static_cast<int64_t>((blockIdx.x - row * tiles) * kTile);
  const int64_t end = min(begin + kTile, a.vocab);
  const RowFactors factors(a, row);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const int64_t at = row * a.vocab + i;
    const float d = factors.Gradient<true>(a.logits[at], static_cast<int32_t>(i));
    a.dlogits[at] = factors.finite ? contract::FloatToBf16(d) : static_cast<Bf16>(kNaNPair);
  }
}

}  // namespace

absl::Status Run(const LogProbGradientArgs& args, const Stream& stream) {
  const bool aligned =
      args.vocab % kColumns == 0 && Aligned16(args.logits) && Aligned16(args.dlogits);
  const auto tiles = static_cast<unsigned>(CeilDiv(args.vocab, int64_t{kTile}));
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(args.rows) * tiles),
                     .threads = dim3(kThreads)};
  return Launch(aligned ? LogProbGradientKernel : RaggedLogProbGradientKernel, grid, stream, args,
                tiles);
}

}  // namespace isobit::cuda
