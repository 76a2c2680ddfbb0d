// What lies between the qkv projection and attention in training, and its gradient, on a GPU
// against the oracle, bit for bit.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/ops/qkv.h"
#include "tests/kernels/cuda/gradient_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::SameBits;
using testing_support::SameNumbers;
using testing_support::Scaled;
using testing_support::View;
using testing_support::Workspace;

constexpr int64_t kPositions = 500;

// The heads of some rows, their gradients, and the results of both ops.
struct HeadsCase {
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  bool has_norms = false;
  float eps = 1e-6f;
  std::vector<int64_t> packs;
  std::vector<int32_t> positions;
  std::vector<float> cosine, sine;
  std::vector<Bf16> qkv, q_norm, k_norm, dq, dk, dv;
  std::vector<Bf16> q, k, v, dqkv;
  std::vector<float> dq_norm, dk_norm;

  int64_t QueryColumns() const { return int64_t{heads} * head_dim; }
  int64_t KvColumns() const { return int64_t{kv_heads} * head_dim; }
  int64_t Width() const { return QueryColumns() + 2 * KvColumns(); }

  TrainingQkvArgs Forward() {
    return {.qkv = qkv.data(),
            .rows = rows,
            .positions = positions.data(),
            .heads = heads,
            .kv_heads = kv_heads,
            .head_dim = head_dim,
            .q_norm = has_norms ? q_norm.data() : nullptr,
            .k_norm = has_norms ? k_norm.data() : nullptr,
            .eps = eps,
            .cosine = cosine.data(),
            .sine = sine.data(),
            .q = q.data(),
            .k = k.data(),
            .v = v.data()};
  }
  QkvGradientArgs Backward() {
    return {.forward = Forward(),
            .dq = dq.data(),
            .dk = dk.data(),
            .dv = dv.data(),
            .packs = packs,
            .dqkv = dqkv.data(),
            .dq_norm = has_norms ? dq_norm.data() : nullptr,
            .dk_norm = has_norms ? dk_norm.data() : nullptr};
  }
};

class TrainingQkvTest : public testing_support::GradientTest {
 protected:
  HeadsCase AnyCase(int case_number) {
    constexpr int32_t kHeadDims[] = {32, 64, 80, 96, 128, 192, 256};
    HeadsCase c;
    c.head_dim = static_cast<int32_t>(Chance(4) ? 2 * (1 + Below(160)) : kHeadDims[Below(7)]);
    c.kv_heads = static_cast<int32_t>(1 + Below(Chance(4) ? 12 : 4));
    c.heads = static_cast<int32_t>(c.kv_heads * (1 + Below(4)));
    c.rows = RowsOfPacks(c.Width(), case_number % 10 == 0 ? 400000 : 50000);
    c.has_norms = Chance(2);
    if (Chance(8)) c.eps = 0.0f;
    c.packs = AnyPacks(c.rows);
    for (int64_t r = 0; r < c.rows; ++r) {
      c.positions.push_back(static_cast<int32_t>(Below(kPositions)));
    }
    c.cosine = operands_.Floats(kPositions * c.head_dim / 2, false);
    c.sine = operands_.Floats(kPositions * c.head_dim / 2, false);
    const bool specials = Chance(3);
    c.qkv = operands_.Bf16s(c.rows * c.Width(), specials);
    c.q_norm = operands_.Bf16s(c.head_dim, false);
    c.k_norm = operands_.Bf16s(c.head_dim, false);
    c.dq = operands_.Bf16s(c.rows * c.QueryColumns(), specials);
    c.dk = operands_.Bf16s(c.rows * c.KvColumns(), specials);
    c.dv = operands_.Bf16s(c.rows * c.KvColumns(), specials);
    if (Chance(4)) std::fill(c.dq.begin(), c.dq.end(), Bf16{0});
    c.q.resize(c.dq.size());
    c.k.resize(c.dk.size());
    c.v.resize(c.dv.size());
    c.dqkv.resize(c.qkv.size());
    c.dq_norm.resize(c.q_norm.size());
    c.dk_norm.resize(c.k_norm.size());
    return c;
  }

  // The case with its results computed on the GPU.
  HeadsCase OnGpu(const HeadsCase& host) {
    HeadsCase c = host;
    const size_t offset = Offset(sizeof(Bf16));
    DeviceBuffer<int32_t> positions(c.positions);
    DeviceBuffer<float> cosine(c.cosine, Chance(8) ? sizeof(float) : 0);
    DeviceBuffer<float> sine(c.sine);
    DeviceBuffer<Bf16> qkv(c.qkv, offset), q_norm(c.q_norm), k_norm(c.k_norm), dq(c.dq, offset),
        dk(c.dk), dv(c.dv);
    DeviceBuffer<Bf16> q(static_cast<int64_t>(c.q.size()), offset),
        k(static_cast<int64_t>(c.k.size())), v(static_cast<int64_t>(c.v.size())),
        dqkv(static_cast<int64_t>(c.dqkv.size()), offset);
    DeviceBuffer<float> dq_norm(c.head_dim), dk_norm(c.head_dim);
    TrainingQkvArgs forward = c.Forward();
    forward.positions = positions.data();
    forward.cosine = cosine.data();
    forward.sine = sine.data();
    forward.qkv = qkv.data();
    forward.q_norm = c.has_norms ? q_norm.data() : nullptr;
    forward.k_norm = c.has_norms ? k_norm.data() : nullptr;
    forward.q = q.data();
    forward.k = k.data();
    forward.v = v.data();
    EXPECT_TRUE(cuda::Run(forward, AnyStream()).ok());
    if (!c.has_norms) forward.qkv = nullptr;  // not read
    const QkvGradientArgs backward = {.forward = forward,
                                      .dq = dq.data(),
                                      .dk = dk.data(),
                                      .dv = dv.data(),
                                      .packs = c.packs,
                                      .dqkv = dqkv.data(),
                                      .dq_norm = c.has_norms ? dq_norm.data() : nullptr,
                                      .dk_norm = c.has_norms ? dk_norm.data() : nullptr};
    const Workspace workspace;
    EXPECT_TRUE(cuda::Run(backward, workspace.On(AnyStream())).ok());
    c.q = q.CopyOut();
    c.k = k.CopyOut();
    c.v = v.CopyOut();
    c.dqkv = dqkv.CopyOut();
    if (c.has_norms) c.dq_norm = dq_norm.CopyOut();
    if (c.has_norms) c.dk_norm = dk_norm.CopyOut();
    EXPECT_TRUE(q.GuardsIntact() && k.GuardsIntact() && v.GuardsIntact() && dqkv.GuardsIntact() &&
                dq_norm.GuardsIntact() && dk_norm.GuardsIntact() && workspace.GuardsIntact());
    return c;
  }
};

TEST_F(TrainingQkvTest, RandomCases) {
  int cases = 0;
  for (; cases < Scaled(600) && !HasFailure(); ++cases) {
    HeadsCase c = AnyCase(cases);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", c.rows, " rows, heads ", c.heads, " and ",
                              c.kv_heads, " x ", c.head_dim, ", ", c.packs.size() - 1, " packs",
                              c.has_norms ? ", norms" : ""));
    ASSERT_TRUE(oracle_.Run(c.Forward()).ok());
    ASSERT_TRUE(oracle_.Run(c.Backward()).ok());
    const HeadsCase actual = OnGpu(c);
    EXPECT_TRUE(SameBits(View(actual.q), View(c.q)));
    EXPECT_TRUE(SameBits(View(actual.k), View(c.k)));
    EXPECT_TRUE(SameBits(View(actual.v), View(c.v)));
    EXPECT_TRUE(SameBits(View(actual.dqkv), View(c.dqkv)));
    EXPECT_TRUE(SameNumbers(actual.dq_norm, c.dq_norm));
    EXPECT_TRUE(SameNumbers(actual.dk_norm, c.dk_norm));
  }
  std::printf("TrainingQkv and QkvGradient: %d cases\n", cases);
}

// Control: dq_norm with the heads of a row added before the rows.
TEST_F(TrainingQkvTest, AWrongOrderOfHeadsShows) {
  HeadsCase c;
  while (!c.has_norms || c.rows < 100 || c.heads < 3 || c.head_dim < 64) c = AnyCase(0);
  c.eps = 1e-6f;
  c.packs = {0, c.rows};
  c.qkv =
      testing_support::RandomBf16(testing_support::Family::kNormal, c.rows * c.Width(), random_);
  c.dq = testing_support::RandomBf16(testing_support::Family::kNormal, c.rows * c.QueryColumns(),
                                     random_);
  const HeadsCase actual = OnGpu(c);
  int unequal = 0;
  const int32_t half = c.head_dim / 2;
  for (int32_t column = 0; column < c.head_dim; ++column) {
    float sum = 0.0f;
    for (int64_t r = 0; r < c.rows; ++r) {
      const int64_t angle = c.positions[static_cast<size_t>(r)] * half + column % half;
      for (int32_t h = 0; h < c.heads; ++h) {
        const Bf16* head = c.qkv.data() + r * c.Width() + h * c.head_dim;
        const Bf16* d = c.dq.data() + r * c.QueryColumns() + h * c.head_dim;
        const contract::RotatedGradient pair = contract::RotateGradient(
            d[column % half], d[column % half + half], c.cosine[static_cast<size_t>(angle)],
            c.sine[static_cast<size_t>(angle)]);
        const float inverse =
            contract::InverseRms(contract::SumOfSquares(head, c.head_dim), c.head_dim, c.eps);
        sum = contract::Add(sum, contract::NormWeightTerm(column < half ? pair.first : pair.second,
                                                          head[column], inverse));
      }
    }
    unequal += sum != actual.dq_norm[static_cast<size_t>(column)] ? 1 : 0;
  }
  EXPECT_GT(unequal, 0);
  std::printf("heads before rows: %d of %d columns of dq_norm differ\n", unequal, c.head_dim);
}

}  // namespace
}  // namespace isobit::cuda
