// ForwardProbe: equal passes give equal digests on any number of ranks, and a fault of the
// arithmetic is seen first at the op that has it.
#include "kernels/model/forward_probe.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/model_directory.h"
#include "common/parallel/thread_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/gather_all_reduce.h"
#include "kernels/model/numerics.h"
#include "kernels/model/resident_weights.h"
#include "kernels/model/transformer.h"
#include "kernels/oracle/oracle_ops.h"
#include "tests/support/forwarding_ops.h"
#include "tests/support/prepare_blocks.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing_support::ForwardingOps;

constexpr int32_t kPageSize = 4;

// Each plants one fault in the second layer, by the number of calls that an op has had.
class FaultyOps final : public ForwardingOps {
 public:
  enum class Fault { kNone, kScale, kPosition, kPage, kNorm, kActivation };

  FaultyOps(std::unique_ptr<Ops> ops, Fault fault) : ForwardingOps(std::move(ops)), fault_(fault) {}

  absl::Status Qkv(const QkvArgs& args) override {
    QkvArgs changed = args;
    std::vector<SequenceRows> sequences(args.sequences.host.begin(), args.sequences.host.end());
    if (fault_ == Fault::kPosition && num_qkv_++ == 1) {
      // Rotates by the next position. The place in the cache moves, too, which may need a page
      // more.
      sequences.front().first_position += 1;
      pages_ = PagesOf(sequences.front());
      pages_.push_back(pages_.front());
      sequences.front().pages = pages_.data();
      changed.sequences.host = sequences;
    }
    return ForwardingOps::Qkv(changed);
  }

  absl::Status Attention(const AttentionArgs& args) override {
    AttentionArgs changed = args;
    std::vector<SequenceRows> sequences(args.sequences.host.begin(), args.sequences.host.end());
    const bool is_second = num_attention_++ == 1;
    if (fault_ == Fault::kScale && is_second) changed.scale *= 1.0009765625f;
    if (fault_ == Fault::kPage && is_second) {
      // Reads the second page twice, as if the first were another sequence's.
      pages_ = PagesOf(sequences.front());
      pages_.front() = pages_[1];
      sequences.front().pages = pages_.data();
      changed.sequences.host = sequences;
    }
    return ForwardingOps::Attention(changed);
  }

  absl::Status RmsNorm(const RmsNormArgs& args) override {
    RmsNormArgs changed = args;
    if (fault_ == Fault::kNorm && num_norms_++ == 2) changed.eps *= 4;
    return ForwardingOps::RmsNorm(changed);
  }

  absl::Status Linear(const LinearArgs& args) override {
    const absl::Status done = ForwardingOps::Linear(args);
    if (fault_ == Fault::kActivation && args.swiglu_out != nullptr && num_activations_++ == 1) {
      args.swiglu_out[5] ^= 1;  // the last bit of one element
    }
    return done;
  }

 private:
  static std::vector<int32_t> PagesOf(const SequenceRows& sequence) {
    return {sequence.pages, sequence.pages + (sequence.num_rows + kPageSize - 1) / kPageSize};
  }

  const Fault fault_;
  int num_qkv_ = 0, num_attention_ = 0, num_norms_ = 0, num_activations_ = 0;
  std::vector<int32_t> pages_;
};

using Fault = FaultyOps::Fault;

class ForwardProbeTest : public ::testing::Test {
 protected:
  ForwardProbeTest() {
    testing_support::WriteTinyModel(testing_support::TinyConfig(Architecture::kQwen3), 5,
                                    dir_.path());
    config_ = *LoadModelConfig(dir_.path());
  }

  // What a pass sees on `size` ranks, with a fault on the last one.
  ProbeReport Probe(int size, const ProbeWanted& wanted = {}, Fault fault = Fault::kNone,
                    bool oracle = false) const {
    ThreadGroup group(size);
    const ProbePass pass(kTokens, kPageSize);
    std::vector<ForwardProbe> probes;
    for (int r = 0; r < size; ++r)
      probes.emplace_back(config_, *ShapeOfRank(config_, r, size), wanted);
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        FaultyOps ops(oracle ? MakeOracleOps() : MakeCpuOps(CpuOptions()),
                      r == size - 1 ? fault : Fault::kNone);
        Run(pass, *ShapeOfRank(config_, r, size), ops, group.rank(r),
            probes[static_cast<size_t>(r)]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return ForwardProbe::Merge(probes);
  }

  void Run(const ProbePass& pass, const RankShape& shape, Ops& ops, Communicator& comm,
           ForwardProbe& probe) const {
    const Checkpoint checkpoint = *Checkpoint::Open(dir_.path());
    const WeightLayout layout(config_, shape, ops.packer());
    const auto weights = *ResidentWeights::Create(layout, ops.device());
    ISOBIT_ASSERT_OK(weights->Commit(
        testing_support::PrepareBlocks(checkpoint, "", {weights.get()})->ranks.front()));
    const contract::RopeTable rope = RopeTableOf(config_, 64);
    GatherAllReduce all_reduce(ops, comm);
    Transformer transformer(layout, rope, ops, shape.size > 1 ? &all_reduce : nullptr);
    const KvCache cache =
        *KvCache::Create(config_, shape, static_cast<int32_t>(pass.pages.size()), kPageSize,
                         /*shared_layers=*/true, ops.device());
    const Batch batch = {.ids = pass.ids, .sequences = {pass.sequence}};
    std::vector<Bf16> hidden(pass.ids.size() * static_cast<size_t>(config_.hidden_size));
    transformer.SetProbe(&probe);
    ISOBIT_ASSERT_OK(transformer.Forward(batch, *weights, cache, hidden.data()));
    std::vector<float> logits(static_cast<size_t>(shape.vocab.size()));
    const Bf16* const last =
        hidden.data() + hidden.size() - static_cast<size_t>(config_.hidden_size);
    ISOBIT_ASSERT_OK(transformer.Logits(last, 1, *weights, logits.data(), shape.vocab.size()));
    probe.SeeLogits(logits.data(), static_cast<int64_t>(pass.ids.size()) - 1);
    // Until here other ranks may read this one's partial sums.
    ISOBIT_EXPECT_OK(comm.Barrier());
  }

  // The first site that differs; {-1, ...}: none.
  static ProbeSite FirstDifference(const ProbeReport& a, const ProbeReport& b) {
    EXPECT_EQ(a.digests.size(), b.digests.size());
    for (size_t i = 0; i < a.digests.size(); ++i) {
      EXPECT_EQ(a.digests[i].site, b.digests[i].site);
      if (a.digests[i].digest != b.digests[i].digest) return a.digests[i].site;
    }
    return {.layer = -1};
  }

  static inline const std::vector<int32_t> kTokens = {3, 7, 2, 9, 4, 4, 8, 5, 6, 2, 3};
  const testing_support::TempDir dir_;
  ModelConfig config_;
};

TEST_F(ForwardProbeTest, RanksAndBackendsGiveOneDigest) {
  const ProbeReport one = Probe(1);
  EXPECT_EQ(one.digests.size(), 3 + 10 * static_cast<size_t>(config_.num_layers));
  for (const int size : {2, 4, 8}) EXPECT_EQ(FirstDifference(one, Probe(size)).layer, -1) << size;
  EXPECT_EQ(FirstDifference(one, Probe(2, {}, Fault::kNone, /*oracle=*/true)).layer, -1);
}

TEST_F(ForwardProbeTest, RowsAndValuesAreTheWholeModels) {
  for (const ProbeOp op : {ProbeOp::kQkv, ProbeOp::kK, ProbeOp::kAttention, ProbeOp::kActivation}) {
    const ProbeWanted wanted = {.site = ProbeSite{1, op}, .row = 3};
    const ProbeReport one = Probe(1, wanted), four = Probe(4, wanted);
    EXPECT_EQ(one.row_digests.size(), kTokens.size());
    EXPECT_EQ(one.row_digests, four.row_digests);
    EXPECT_FALSE(one.values.empty());
    EXPECT_EQ(one.values, four.values);
  }
  const auto heads =
      static_cast<size_t>(config_.num_heads) + 2 * static_cast<size_t>(config_.num_kv_heads);
  EXPECT_EQ(Probe(4, {.site = ProbeSite{0, ProbeOp::kQkv}, .row = 0}).values.size(),
            heads * static_cast<size_t>(config_.head_dim));
}

TEST_F(ForwardProbeTest, AFaultIsSeenWhereItIs) {
  const ProbeReport right = Probe(1);
  const std::vector<std::pair<Fault, ProbeSite>> cases = {
      {Fault::kScale, {1, ProbeOp::kAttention}},       {Fault::kPosition, {1, ProbeOp::kQ}},
      {Fault::kPage, {1, ProbeOp::kAttention}},        {Fault::kNorm, {1, ProbeOp::kInputNorm}},
      {Fault::kActivation, {1, ProbeOp::kActivation}},
  };
  for (const auto& [fault, site] : cases) {
    for (const int size : {1, 2}) {
      const ProbeSite found = FirstDifference(right, Probe(size, {}, fault));
      EXPECT_EQ(found, site) << "fault " << static_cast<int>(fault) << " of " << size
                             << " ranks: layer " << found.layer << ", op "
                             << static_cast<int>(found.op);
    }
  }
}

TEST_F(ForwardProbeTest, AFaultOfOneElementIsFoundThere) {
  const ProbeWanted wanted = {.site = ProbeSite{1, ProbeOp::kActivation}, .row = 0};
  const ProbeReport right = Probe(2, wanted), wrong = Probe(1, wanted, Fault::kActivation);
  EXPECT_NE(right.row_digests[0], wrong.row_digests[0]);
  EXPECT_EQ(right.row_digests[1], wrong.row_digests[1]);
  ASSERT_EQ(right.values.size(), wrong.values.size());
  for (size_t c = 0; c < right.values.size(); ++c) {
    EXPECT_EQ(right.values[c] != wrong.values[c], c == 5) << c;
  }
}

}  // namespace
}  // namespace isobit
