// The kernel between the qkv projection and attention against the CPU backend, bit for bit, and a
// layer's row-wise ops as a chain of dependent launches, on several streams and in replayed graphs.
#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/common/step_tables/sequences.h"
#include "tests/kernels/cuda/row_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::SameBits;
using testing_support::Scaled;
using testing_support::View;

// Sequences as the launchers read them, and their copy on the GPU.
struct SequenceCase {
  std::vector<SequenceRows> host;
  std::vector<std::vector<int32_t>> pages_of;
  std::vector<int32_t> first_row, first_position, first_page, pages, sequence_of_row;
  std::vector<std::unique_ptr<DeviceBuffer<int32_t>>> buffers;
  DeviceSequences device;

  void Upload() {
    const auto put = [this](const std::vector<int32_t>& values) {
      buffers.push_back(std::make_unique<DeviceBuffer<int32_t>>(values));
      return buffers.back()->data();
    };
    device.first_row = put(first_row);
    device.first_position = put(first_position);
    device.first_page = put(first_page);
    device.pages = put(pages);
    device.sequence_of_row = put(sequence_of_row);
    device.num_sequences = static_cast<int32_t>(first_position.size());
    device.num_rows = static_cast<int32_t>(sequence_of_row.size());
  }
};

class QkvTest : public testing_support::RowTest {
 protected:
  static constexpr int64_t kPositions = 700;

  // Decode tokens and prompts in pages of their own, in random order; `padding` rows at the end.
  SequenceCase AnySequences(int32_t page_size, int64_t most_rows, int64_t padding,
                            int32_t* num_pages) {
    SequenceCase c;
    const int64_t count = 1 + Below(6);
    *num_pages = 0;
    int32_t rows = 0;
    for (int64_t s = 0; s < count; ++s) {
      const int32_t n = static_cast<int32_t>(Chance(2) ? 1 : 1 + Below(most_rows));
      const int32_t position = static_cast<int32_t>(Chance(3) ? 0 : Below(kPositions - n));
      c.first_row.push_back(rows);
      c.first_position.push_back(position);
      c.first_page.push_back(static_cast<int32_t>(c.pages.size()));
      c.sequence_of_row.insert(c.sequence_of_row.end(), static_cast<size_t>(n),
                               static_cast<int32_t>(s));
      const int32_t used = (position + n + page_size - 1) / page_size;
      for (int32_t p = 0; p < used; ++p) c.pages.push_back((*num_pages)++);
      c.host.push_back({.first_row = rows, .num_rows = n, .first_position = position});
      rows += n;
    }
    c.first_row.push_back(rows);
    std::shuffle(c.pages.begin(), c.pages.end(), random_);
    for (int64_t s = 0; s < count; ++s) {
      c.host[static_cast<size_t>(s)].pages = c.pages.data() + c.first_page[static_cast<size_t>(s)];
    }
    c.sequence_of_row.insert(c.sequence_of_row.end(), static_cast<size_t>(padding), -1);
    c.Upload();
    return c;
  }
};

TEST_F(QkvTest, Qkv) {
  constexpr int32_t kHeadDims[] = {16, 32, 64, 80, 96, 128, 128, 192, 256};
  int cases = 0;
  int poisoned = 0;
  for (; cases < Scaled(2500) && !HasFailure(); ++cases) {
    const bool large = cases % 500 == 499;
    const int32_t d = Chance(5) ? static_cast<int32_t>(2 + 2 * Below(160))
                                : kHeadDims[random_() % std::size(kHeadDims)];
    const int32_t kv_heads = static_cast<int32_t>(1 + Below(large ? 8 : 4));
    const int32_t heads = kv_heads * static_cast<int32_t>(1 + Below(8));
    const int32_t page_size = Chance(3) ? static_cast<int32_t>(1 + Below(40)) : 16 << Below(4);
    const int64_t padding = Chance(3) ? Below(5) : 0;
    const int64_t columns = int64_t{heads + 2 * kv_heads} * d;
    const int64_t ld = columns + (Chance(2) ? 0 : Chance(2) ? 8 * Below(4) : Below(20));
    int32_t num_pages = 0;
    const SequenceCase sequences =
        AnySequences(page_size, std::min(kPositions / 2, large ? kPositions : 1 + 40000 / columns),
                     padding, &num_pages);
    const int64_t rows = sequences.device.num_rows;
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " rows, ", heads, "+", kv_heads,
                              " heads of ", d, ", page ", page_size, ", ld ", ld));

    const bool specials = Chance(2);
    const bool q_normed = Chance(2);
    const bool k_normed = Chance(8) ? !q_normed : q_normed;
    const std::vector<Bf16> qkv = operands_.Bf16s(rows * ld, specials);
    const std::vector<Bf16> q_norm = operands_.Bf16s(d, false);
    const std::vector<Bf16> k_norm = operands_.Bf16s(d, false);
    const std::vector<float> cosine = operands_.Floats(kPositions * d / 2, false);
    const std::vector<float> sine = operands_.Floats(kPositions * d / 2, false);
    const int64_t cache = int64_t{num_pages} * kv_heads * page_size * d;

    DeviceBuffer<Bf16> device_qkv(qkv, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> device_q_norm(q_norm, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> device_k_norm(k_norm, Offset(sizeof(Bf16)));
    DeviceBuffer<float> device_cosine(cosine, Chance(4) ? Offset(sizeof(float)) : 0);
    DeviceBuffer<float> device_sine(sine, Chance(4) ? Offset(sizeof(float)) : 0);
    DeviceBuffer<Bf16> k(cache, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> v(cache, Offset(sizeof(Bf16)));
    std::vector<Bf16> expected = qkv;
    std::vector<Bf16> expected_k = k.CopyOut();
    std::vector<Bf16> expected_v = v.CopyOut();
    QkvArgs args = {.qkv = expected.data(),
                    .ld = ld,
                    .heads = heads,
                    .q_norm = q_normed ? q_norm.data() : nullptr,
                    .k_norm = k_normed ? k_norm.data() : nullptr,
                    .eps = 1e-6f,
                    .cosine = cosine.data(),
                    .sine = sine.data(),
                    .sequences = {.host = sequences.host},
                    .kv = {.k = expected_k.data(),
                           .v = expected_v.data(),
                           .page_size = page_size,
                           .kv_heads = kv_heads,
                           .head_dim = d}};
    ASSERT_TRUE(cpu_->Run(args).ok());
    poisoned += std::count(expected_k.begin(), expected_k.end(), contract::kPoisonedKey) >= d;
    // The GPU leaves k, v and the gaps between rows as they are.
    for (int64_t r = 0; r < rows; ++r) {
      std::copy(qkv.begin() + r * ld + int64_t{heads} * d, qkv.begin() + (r + 1) * ld,
                expected.begin() + r * ld + int64_t{heads} * d);
    }

    args.qkv = device_qkv.data();
    args.q_norm = q_normed ? device_q_norm.data() : nullptr;
    args.k_norm = k_normed ? device_k_norm.data() : nullptr;
    args.cosine = device_cosine.data();
    args.sine = device_sine.data();
    args.sequences = {.host = {}, .device = &sequences.device};
    args.kv.k = k.data();
    args.kv.v = v.data();
    for (int repeat = 0; repeat < (cases % 16 == 0 ? 3 : 1); ++repeat) {
      device_qkv.CopyIn(qkv);
      k.Poison();
      v.Poison();
      ASSERT_TRUE(cuda::Run(args, AnyStream()).ok());
      EXPECT_TRUE(SameBits(View(device_qkv.CopyOut()), View(expected))) << "q";
      EXPECT_TRUE(SameBits(View(k.CopyOut()), View(expected_k))) << "k";
      EXPECT_TRUE(SameBits(View(v.CopyOut()), View(expected_v))) << "v";
    }
    EXPECT_TRUE(device_qkv.GuardsIntact() && k.GuardsIntact() && v.GuardsIntact());
  }
  EXPECT_GT(50 * poisoned, cases);
  std::printf("Qkv: %d cases, %d with a poisoned head\n", cases, poisoned);
}

// A layer's row-wise ops in a chain, each launched as a dependent of the one before.
class ChainTest : public QkvTest {
 protected:
  static constexpr int64_t kRows = 70;
  static constexpr int32_t kHeads = 8;
  static constexpr int32_t kHeadDim = 128;
  static constexpr int64_t kHidden = (kHeads + 4) * kHeadDim;  // a qkv row of two KV heads
  static constexpr int32_t kPage = 32;

  // One stream's buffers.
  struct Chain {
    Chain(const std::vector<int32_t>& id_values, const std::vector<Bf16>& table_values,
          const std::vector<float>& partial_values, const std::vector<Bf16>& weight_values)
        : ids(id_values), table(table_values), partials(partial_values), weight(weight_values) {}
    DeviceBuffer<int32_t> ids;
    DeviceBuffer<Bf16> table;
    DeviceBuffer<float> partials;  // [2][kRows, kHidden]
    DeviceBuffer<Bf16> weight;
    DeviceBuffer<float> sum{kRows * kHidden};
    DeviceBuffer<Bf16> residual{kRows * kHidden};
    DeviceBuffer<Bf16> normed{kRows * kHidden};
    DeviceBuffer<Bf16> k{kRows * 2 * kPage * kHeadDim};
    DeviceBuffer<Bf16> v{kRows * 2 * kPage * kHeadDim};
    DeviceBuffer<Bf16> out{kRows * kHidden / 2};
  };

  struct Pointers {
    const int32_t* ids;
    const Bf16* table;
    const float* partials[2];
    const Bf16* weight;
    float* sum;
    Bf16* residual;
    Bf16* normed;
    Bf16* k;
    Bf16* v;
    Bf16* out;
  };

  // Embedding, a sum of partials, RMSNorm, q and k on the normed rows, SwiGLU of what results.
  template <typename Embedding, typename Reduce, typename RmsNorm, typename Qkv, typename SwiGlu>
  static void RunChain(const Pointers& p, const float* tables, const SequenceTable& sequences,
                       const Embedding& embedding, const Reduce& reduce, const RmsNorm& rms_norm,
                       const Qkv& qkv, const SwiGlu& swiglu) {
    EXPECT_TRUE(embedding(EmbeddingArgs{.ids = p.ids,
                                        .rows = kRows,
                                        .table = p.table,
                                        .hidden = kHidden,
                                        .out = p.residual})
                    .ok());
    EXPECT_TRUE(reduce(ReduceArgs{.partials = p.partials,
                                  .num_ranks = 2,
                                  .begin = 0,
                                  .end = kRows * kHidden,
                                  .count = kRows * kHidden,
                                  .out = p.sum})
                    .ok());
    EXPECT_TRUE(rms_norm(RmsNormArgs{.residual = p.residual,
                                     .sum = p.sum,
                                     .weight = p.weight,
                                     .out = p.normed,
                                     .rows = kRows,
                                     .hidden = kHidden,
                                     .eps = 1e-6f})
                    .ok());
    EXPECT_TRUE(qkv(QkvArgs{.qkv = p.normed,
                            .ld = kHidden,
                            .heads = kHeads,
                            .q_norm = p.weight,
                            .k_norm = p.weight,
                            .eps = 1e-6f,
                            .cosine = tables,
                            .sine = tables + kPositions * kHeadDim / 2,
                            .sequences = sequences,
                            .kv = {.k = p.k,
                                   .v = p.v,
                                   .page_size = kPage,
                                   .kv_heads = 2,
                                   .head_dim = kHeadDim}})
                    .ok());
    // Only the q heads of two rows: between them lie k heads, which the CPU changes in place.
    for (int64_t r = 0; r < kRows; r += kRows - 1) {
      EXPECT_TRUE(swiglu(SwiGluArgs{.gate_up = p.normed + r * kHidden,
                                    .out = p.out + r * kHidden / 2,
                                    .rows = 1,
                                    .columns = kHeads * kHeadDim / 2})
                      .ok());
    }
  }
};

TEST_F(ChainTest, DependentLaunchesStreamsAndReplays) {
  constexpr int kChains = 3;
  SequenceCase sequences;  // kRows decode tokens, a page each
  sequences.first_row.resize(kRows + 1);
  std::iota(sequences.first_row.begin(), sequences.first_row.end(), 0);
  sequences.sequence_of_row.resize(kRows);
  std::iota(sequences.sequence_of_row.begin(), sequences.sequence_of_row.end(), 0);
  sequences.pages = sequences.first_page = sequences.sequence_of_row;
  for (int64_t r = 0; r < kRows; ++r) {
    sequences.first_position.push_back(static_cast<int32_t>(Below(kPage)));
    sequences.host.push_back({.first_row = r,
                              .num_rows = 1,
                              .first_position = sequences.first_position.back(),
                              .pages = sequences.pages.data() + r});
  }
  sequences.Upload();
  const std::vector<float> tables = operands_.Floats(kPositions * kHeadDim, false);
  DeviceBuffer<float> device_tables(tables);

  for (int trial = 0; trial < Scaled(20); ++trial) {
    std::vector<std::unique_ptr<Chain>> chains;
    std::vector<std::vector<Bf16>> expected;
    std::vector<cudaStream_t> streams(kChains);
    for (int c = 0; c < kChains; ++c) {
      ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&streams[c], cudaStreamNonBlocking));
      std::vector<int32_t> ids(kRows);
      for (int32_t& id : ids) id = static_cast<int32_t>(Below(10));
      const std::vector<Bf16> table = operands_.Bf16s(10 * kHidden, false);
      const std::vector<float> partials = operands_.Floats(2 * kRows * kHidden, false);
      const std::vector<Bf16> weight = operands_.Bf16s(kHidden, false);
      std::vector<float> sum(kRows * kHidden);
      std::vector<Bf16> residual(kRows * kHidden), normed(kRows * kHidden);
      std::vector<Bf16> k(kRows * 2 * kPage * kHeadDim, 0xffff), v = k;
      std::vector<Bf16> out(kRows * kHidden / 2, 0xffff);
      RunChain(
          {ids.data(),
           table.data(),
           {partials.data(), partials.data() + kRows * kHidden},
           weight.data(),
           sum.data(),
           residual.data(),
           normed.data(),
           k.data(),
           v.data(),
           out.data()},
          tables.data(), {.host = sequences.host},
          [&](const EmbeddingArgs& a) { return cpu_->Run(a); },
          [&](const ReduceArgs& a) { return cpu_->Run(a); },
          [&](const RmsNormArgs& a) { return cpu_->Run(a); },
          [&](const QkvArgs& a) { return cpu_->Run(a); },
          [&](const SwiGluArgs& a) { return cpu_->Run(a); });
      expected.insert(expected.end(), {residual, k, v, out});
      chains.push_back(std::make_unique<Chain>(ids, table, partials, weight));
    }
    // First launched on all streams at once, then captured and replayed.
    const auto launch = [&](int c) {
      Chain& b = *chains[c];
      const Stream stream = {streams[c], trial % 2 == 0};
      RunChain(
          {b.ids.data(),
           b.table.data(),
           {b.partials.data(), b.partials.data() + kRows * kHidden},
           b.weight.data(),
           b.sum.data(),
           b.residual.data(),
           b.normed.data(),
           b.k.data(),
           b.v.data(),
           b.out.data()},
          device_tables.data(), {.host = {}, .device = &sequences.device},
          [&](const EmbeddingArgs& a) { return cuda::Run(a, stream); },
          [&](const ReduceArgs& a) { return cuda::Run(a, stream); },
          [&](const RmsNormArgs& a) { return cuda::Run(a, stream); },
          [&](const QkvArgs& a) { return cuda::Run(a, stream); },
          [&](const SwiGluArgs& a) { return cuda::Run(a, stream); });
    };
    const auto poison = [](Chain& b) {
      for (DeviceBuffer<Bf16>* buffer : {&b.residual, &b.normed, &b.k, &b.v, &b.out}) {
        buffer->Poison();
      }
      b.sum.Poison();
    };
    const auto check = [&](int c) {
      Chain& b = *chains[c];
      DeviceBuffer<Bf16>* buffers[] = {&b.residual, &b.k, &b.v, &b.out};
      for (size_t i = 0; i < std::size(buffers); ++i) {
        EXPECT_TRUE(
            SameBits(View(buffers[i]->CopyOut()), View(expected[static_cast<size_t>(c) * 4 + i])))
            << "trial " << trial << ", stream " << c << ", buffer " << i;
      }
    };
    for (int c = 0; c < kChains; ++c) launch(c);
    for (int c = 0; c < kChains; ++c) check(c);
    std::vector<cudaGraphExec_t> graphs(kChains);
    for (int c = 0; c < kChains; ++c) {
      cudaGraph_t graph;
      ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(streams[c], cudaStreamCaptureModeThreadLocal));
      launch(c);
      ISOBIT_CHECK_CUDA(cudaStreamEndCapture(streams[c], &graph));
      ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&graphs[c], graph, 0));
      ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
    }
    for (int replay = 0; replay < 5; ++replay) {
      for (int c = 0; c < kChains; ++c) poison(*chains[c]);
      for (int c = 0; c < kChains; ++c) {
        for (int again = 0; again < 3; ++again) {
          ISOBIT_CHECK_CUDA(cudaGraphLaunch(graphs[c], streams[c]));
        }
      }
      for (int c = 0; c < kChains; ++c) check(c);
    }
    for (int c = 0; c < kChains; ++c) {
      ISOBIT_CHECK_CUDA(cudaGraphExecDestroy(graphs[c]));
      ISOBIT_CHECK_CUDA(cudaStreamDestroy(streams[c]));
    }
  }
}

}  // namespace
}  // namespace isobit::cuda
