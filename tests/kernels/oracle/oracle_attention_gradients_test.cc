// Attention over whole sequences, and its gradient, against float64: GQA, a window, two sequences
// and a row of none.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/attention.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/oracle/gradient_cases.h"

namespace isobit {
namespace {

using testing_support::kRoundedOnce;
using testing_support::NormalBf16;
using testing_support::Random;
using testing_support::RelativeError;
using testing_support::Slopes;
using testing_support::ToDoubles;

constexpr size_t kHeads = 4;
constexpr size_t kKvHeads = 2;
constexpr size_t kDim = 20;
constexpr size_t kRows = 44;
constexpr size_t kQ = kHeads * kDim;
constexpr size_t kKv = kKvHeads * kDim;
const std::vector<int32_t> kBounds = {0, 1, 42, 42, 43};  // row 43 belongs to none

struct Attended {
  std::vector<double> out = std::vector<double>(kRows * kQ);
  std::vector<double> log_sums = std::vector<double>(kHeads * kRows);  // of base 2
};

Attended Attend(const std::vector<double>& q, const std::vector<double>& k,
                const std::vector<double>& v, size_t window) {
  Attended result;
  for (size_t s = 0; s + 1 < kBounds.size(); ++s) {
    const auto begin = static_cast<size_t>(kBounds[s]);
    for (size_t i = begin; i < static_cast<size_t>(kBounds[s + 1]); ++i) {
      const size_t first = window != 0 && i + 1 > begin + window ? i + 1 - window : begin;
      for (size_t h = 0; h < kHeads; ++h) {
        const size_t kv_head = h / (kHeads / kKvHeads);
        double sum = 0;
        std::vector<double> out(kDim);
        for (size_t j = first; j <= i; ++j) {
          double score = 0;
          for (size_t e = 0; e < kDim; ++e) {
            score += q[i * kQ + h * kDim + e] * k[j * kKv + kv_head * kDim + e];
          }
          const double weight = std::exp(score / std::sqrt(kDim));
          sum += weight;
          for (size_t e = 0; e < kDim; ++e) out[e] += weight * v[j * kKv + kv_head * kDim + e];
        }
        result.log_sums[h * kRows + i] = std::log2(sum);
        for (size_t e = 0; e < kDim; ++e) result.out[i * kQ + h * kDim + e] = out[e] / sum;
      }
    }
  }
  return result;
}

TEST(OracleGradientsTest, Attention) {
  Random random(1);
  const std::vector<Bf16> q = NormalBf16(kRows * kQ, random);
  const std::vector<Bf16> k = NormalBf16(kRows * kKv, random);
  const std::vector<Bf16> v = NormalBf16(kRows * kKv, random);
  const std::vector<Bf16> dout = NormalBf16(kRows * kQ, random);
  const std::vector<double> q64 = ToDoubles(q);
  const std::vector<double> k64 = ToDoubles(k);
  const std::vector<double> v64 = ToDoubles(v);
  const std::vector<double> dout64 = ToDoubles(dout);
  for (const size_t window : {0, 5}) {
    std::vector<Bf16> out(q.size(), 0x7fff);
    std::vector<float> log_sums(kHeads * kRows);
    TrainingAttentionArgs forward;
    forward.q = q.data();
    forward.k = k.data();
    forward.v = v.data();
    forward.rows = kRows;
    forward.heads = kHeads;
    forward.kv_heads = kKvHeads;
    forward.head_dim = kDim;
    forward.sequences.bounds = kBounds;
    forward.scale = contract::AttentionScale(kDim);
    forward.window = static_cast<int64_t>(window);
    forward.out = out.data();
    forward.log_sums = log_sums.data();
    OracleBackend ops;
    ASSERT_TRUE(ops.Run(forward).ok());
    const Attended exact = Attend(q64, k64, v64, window);
    EXPECT_LT(RelativeError(ToDoubles(out), exact.out), 2 * kRoundedOnce);
    EXPECT_LT(RelativeError(ToDoubles(log_sums), exact.log_sums), 1e-6);

    std::vector<Bf16> dq(q.size(), 0x7fff);
    std::vector<Bf16> dk(k.size(), 0x7fff);
    std::vector<Bf16> dv(v.size(), 0x7fff);
    ASSERT_TRUE(
        ops.Run(AttentionGradientArgs{forward, dout.data(), dq.data(), dk.data(), dv.data()}).ok());
    const auto loss = [&](const Attended& attended) {
      double sum = 0;
      for (size_t i = 0; i < dout64.size(); ++i) sum += dout64[i] * attended.out[i];
      return sum;
    };
    const auto of_q = [&](const std::vector<double>& at) {
      return loss(Attend(at, k64, v64, window));
    };
    const auto of_k = [&](const std::vector<double>& at) {
      return loss(Attend(q64, at, v64, window));
    };
    const auto of_v = [&](const std::vector<double>& at) {
      return loss(Attend(q64, k64, at, window));
    };
    // Weights and score gradients are rounded to bf16, too.
    EXPECT_LT(RelativeError(ToDoubles(dq), Slopes(of_q, q64, 7), 7), 2 * kRoundedOnce);
    EXPECT_LT(RelativeError(ToDoubles(dk), Slopes(of_k, k64, 7), 7), 2 * kRoundedOnce);
    EXPECT_LT(RelativeError(ToDoubles(dv), Slopes(of_v, v64, 7), 7), 2 * kRoundedOnce);
    const auto zeros_at = [](const std::vector<Bf16>& x, size_t begin) {
      return std::all_of(x.begin() + static_cast<std::ptrdiff_t>(begin), x.end(),
                         [](Bf16 value) { return value == 0; });
    };
    EXPECT_TRUE(zeros_at(out, 43 * kQ) && zeros_at(dq, 43 * kQ));
    EXPECT_TRUE(zeros_at(dk, 43 * kKv) && zeros_at(dv, 43 * kKv));
  }
}

}  // namespace
}  // namespace isobit
